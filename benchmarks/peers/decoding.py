"""The user's transform in a benchmark: JPEG bytes to an array of pixels. Needs pillow and numpy."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SIDE = 224


def decode(payload: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Pixels, uint8 [SIDE, SIDE, 3]."""
    with Image.open(io.BytesIO(payload)) as image:
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def decoded_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample whose payload is replaced by its pixels."""
    return {**sample, "bin": decode(sample["bin"])}


def decoded_items(keys: Iterable[str], pixels: Any) -> Iterator[tuple[str, bytes]]:
    """Key and bytes of the pixels of each sample of a batch."""
    for key, one in zip(keys, pixels, strict=True):
        yield key, one.numpy().tobytes()
