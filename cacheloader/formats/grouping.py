"""How the members of a tar form samples, exactly as the ``webdataset`` package groups them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheloader.errors import CorruptShard
from cacheloader.formats.tar import walk_members
from cacheloader.formats.tarblock import pack_index

if TYPE_CHECKING:
    from cacheloader.formats.base import ByteSource

_RESERVED = frozenset(("__key__", "__url__"))
"""Fields that webdataset itself puts into a sample; it refuses members that would be called so, and so do we."""


class Grouping:
    """Members of one archive on their way to samples.

    Args:
        uri: The shard, named in errors.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._fields: dict[str, int] = {}
        self._layouts: dict[tuple[int, ...], int] = {}

    def index(self, data: ByteSource) -> bytes:
        """The sample index of the archive.

        Raises:
            CorruptShard: It is no whole tar, or a sample has a field twice.
        """
        numbers: dict[bytes, int] = {}
        keys: list[bytes] = []
        layouts: list[int] = []
        first_member = [0]
        member_start: list[int] = []
        member_size: list[int] = []
        current: bytes | None = None
        fields: list[int] = []
        for name, start, stop in walk_members(data, uri=self._uri):
            split = split_name(name)
            if split is None:
                continue
            key, suffix = split
            if key != current:
                if current is not None:
                    layouts.append(self._layout(fields))
                    first_member.append(len(member_start))
                keys.append(key)
                current, fields = key, []
            number = numbers.get(suffix)
            if number is None:
                number = numbers[suffix] = self._field(suffix, name, start)
            if number in fields:
                raise CorruptShard(
                    f"shard {self._uri} has a second field {suffix.decode(errors='replace')!r} in sample "
                    f"{key.decode(errors='replace')!r} at offset {start}; a field may appear once in a sample "
                    "(upper and lower case are one): pack the shard again",
                    uri=self._uri,
                )
            fields.append(number)
            member_start.append(start)
            member_size.append(stop - start)
        if current is not None:
            layouts.append(self._layout(fields))
            first_member.append(len(member_start))
        return pack_index(
            shard_bytes=data.size_bytes,
            keys=keys,
            layouts=layouts,
            first_member=first_member,
            member_start=member_start,
            member_size=member_size,
            slots=self._layouts,
            fields=list(self._fields),
        )

    def _layout(self, fields: list[int]) -> int:
        return self._layouts.setdefault(tuple(fields), len(self._layouts))

    def _field(self, suffix: bytes, name: bytes, start: int) -> int:
        field = suffix.decode("utf-8", "surrogateescape").lower()
        if field in _RESERVED:
            raise CorruptShard(
                f"shard {self._uri} has a member {name.decode(errors='replace')!r} at offset {start}, and the field "
                f"{field} is reserved; rename the member",
                uri=self._uri,
            )
        return self._fields.setdefault(field, len(self._fields))


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Key and suffix of a member, ``None`` if it belongs to no sample.

    The key is all up to the first dot of the file name, directories included; the suffix is the rest. Members
    without a dot, and those below a name such as ``__meta__``, belong to none.
    """
    if name.startswith(b"__"):
        top, slash, _ = name.partition(b"/")
        if not slash:
            top = top.removesuffix(b"\n")
        if len(top) >= 4 and top.endswith(b"__"):
            return None
    file_start = name.rfind(b"/") + 1
    dot = name.find(b".", file_start)
    if dot < 0 or not _is_key(name, file_start, dot):
        return None
    return name[:dot], name[dot + 1 :]


def _is_key(name: bytes, file_start: int, dot: int) -> bool:
    """Whether webdataset takes ``name[:dot]`` for a key; two of its rules are side effects that data sets rely on."""
    if b"\n" not in name[:dot]:
        if dot > file_start:
            return True
        # A hidden file counts as a field of its directory, if that has no dot in its own name.
        folder = name[: file_start - 1] if file_start else b"."
        return b"." not in folder[folder.rfind(b"/") + 1 :]
    # Directories with a line break in their name may have no dot behind it.
    for start in (0, *(at + 1 for at in range(dot) if name[at : at + 1] == b"/")):
        if b"\n" not in name[:start] and start < dot and b"." not in name[start:dot]:
            return True
    return False
