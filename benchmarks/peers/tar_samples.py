"""Samples of a tar that is read as a stream, for peers that leave the format to their user. Standard library only."""

from __future__ import annotations

import tarfile
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_BLOCK_BYTES = 1 << 20


def tar_samples(file: IO[bytes] | Any) -> Iterator[tuple[str, bytes]]:
    """Key and payload of each member; a sample here is one member.

    Args:
        file: Open at the start of the tar; read forward only.
    """
    with tarfile.open(fileobj=file, mode="r|", bufsize=_BLOCK_BYTES) as tar:
        for member in tar:
            body = tar.extractfile(member)
            if body is not None:
                yield member.name.partition(".")[0], body.read()
