"""What a saved position repeats of a mixture: short texts, readable as far as they fit, exact always.

A position has to stay below 1 KiB with any number of sources, so a text that grows too long gives way to a digest.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from cacheloader.order.mixture_shares import BLOCK_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

    from cacheloader.order.mixture_shares import Phase
    from cacheloader.order.options import OrderOptions

_LONGEST_TEXT = 160
_DIGEST_CHARS = 10


def manifests_text(names: Sequence[str], digests: Sequence[str]) -> str:
    """Names and manifests of the sources."""
    short = " ".join(f"{name}={digest[:_DIGEST_CHARS]}" for name, digest in zip(names, digests, strict=True))
    return _fitting(short, exact=repr((list(names), list(digests))), count=f"{len(names)} manifests")


def sources_text(names: Sequence[str], options: Sequence[OrderOptions]) -> str:
    """What decides the order inside each source, besides its manifest and the lanes."""
    texts = [_source_text(one) for one in options]
    if len(set(texts)) == 1:
        return f"each({texts[0]})"
    long = " ".join(f"{name}({text})" for name, text in zip(names, texts, strict=True))
    return _fitting(long, exact=long, count=f"{len(names)} sources")


def layout_text(samples_per_shard: Sequence[NDArray[np.int64]]) -> str:
    """How many samples each shard of each source holds: what the order takes from the manifests."""
    exact = repr([_digest(counts.astype("<i8").tobytes(), chars=32) for counts in samples_per_shard])
    shards, samples = (sum(map(size, samples_per_shard)) for size in (len, np.sum))
    return f"{shards} shards, {samples} samples, {_digest(exact.encode(), chars=16)}"


def weights_text(names: Sequence[str], weights: Sequence[Fraction]) -> str:
    """Normalised weights."""
    exact = repr([(name, str(weight)) for name, weight in zip(names, weights, strict=True)])
    short = " ".join(f"{name}={float(weight):.6g}" for name, weight in zip(names, weights, strict=True))
    return _fitting(f"{short} #{_digest(exact.encode(), chars=8)}", exact=exact, count=f"{len(names)} weights")


def schedule_text(names: Sequence[str], phases: Sequence[Phase]) -> str:
    """The changes of weights, all phases but the first."""
    texts = [f"{phase.start_block * BLOCK_ROWS}: {weights_text(names, phase.weights)}" for phase in phases[1:]]
    long = "; ".join(texts)
    return _fitting(long, exact=long, count=f"{len(texts)} changes")


def is_earlier_schedule(saved: str, *, names: Sequence[str], phases: Sequence[Phase], row: int) -> bool:
    """Whether ``saved`` is the text of these phases before some were added that begin at ``row`` or later.

    Of a schedule too long to be spelled out, only phases behind all others are known to have been added.

    Args:
        saved: What ``schedule_text`` gave.
        names: The sources.
        phases: Those of now.
        row: Rows consumed since the beginning of the run.
    """
    count = saved.split(" changes #", maxsplit=1)[0]
    earlier = [
        [phase for phase in phases[1:] if schedule_text(names, [phases[0], phase]) in saved],
        list(phases[1 : 1 + int(count)]) if count.isdecimal() else [],
    ]
    return any(
        schedule_text(names, [phases[0], *known]) == saved
        and all(phase in known or phase.start_block * BLOCK_ROWS >= row for phase in phases[1:])
        for known in earlier
    )


def _source_text(options: OrderOptions) -> str:
    shuffling = f"window={options.shuffle_window}" if options.shuffle else "unshuffled"
    return f"seed={options.seed} {shuffling}" + (f" redeal={options.redeal}" if options.redeal else "")


def _fitting(text: str, *, exact: str, count: str) -> str:
    return text if len(ascii(text)) <= _LONGEST_TEXT else f"{count} #{_digest(exact.encode(), chars=24)}"


def _digest(content: bytes, *, chars: int) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()[:chars]
