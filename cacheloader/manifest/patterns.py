"""What brace patterns and globs stand for. Text only; nothing is looked up."""

from __future__ import annotations

import re
import string
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from cacheloader.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_SHARDS = 10_000_000
"""A pattern that names more is taken for a slip of the pen."""
MAX_BRACES = 100
"""In one pattern, side by side or nested."""
MAX_GLOB_CHARACTERS = 4096
"""As long as a path can be; keys of object stores are shorter."""

_CHARACTERS_PER_NAME = 256
"""On average, so that a short pattern cannot stand for more text than there is memory."""
# No count has more digits, and Python refuses to read numbers of thousands.
_NUMBERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?", re.ASCII)
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d{1,18}))?", re.ASCII)
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase
_ESCAPE = re.compile(r"\\(.)")
_SPECIAL = re.compile(r"\\.|[{},]", re.DOTALL)


def expand_all(urls: Sequence[str], *, max_shards: int = MAX_SHARDS) -> list[str]:
    """The URLs that the brace patterns in ``urls`` stand for, in order.

    Raises:
        ConfigError: Braces do not match, are too many, or stand for more than ``max_shards`` URLs or too much text.
    """
    expanded: list[str] = []
    room = max(max_shards, 1000) * _CHARACTERS_PER_NAME
    if any(url.count("{") > MAX_BRACES for url in urls):
        raise ConfigError(
            f"one of the patterns {_shown(urls)} has more than {MAX_BRACES} braces; write some of them out"
        )
    # Counted first: to write out ten million names in order to refuse them would cost a gigabyte for a moment.
    if sum(num_expanded(url) if "{" in url else 1 for url in urls) > max_shards:
        raise _too_many(urls, max_shards)
    for url in chain.from_iterable(map(expand_braces, urls)):
        room -= len(url)
        if room < 0:
            raise _too_many(urls, max_shards)
        expanded.append(url)
    return expanded


def _too_many(urls: Sequence[str], max_shards: int) -> ConfigError:
    return ConfigError(
        f"the patterns {_shown(urls)} name more than {max_shards} shards, or names that are too long for so "
        "many; check the ranges"
    )


def num_expanded(pattern: str) -> int:
    """How many texts ``expand_braces`` makes of ``pattern``, counted without making them.

    Raises:
        ConfigError: A brace has no partner.
    """
    if not _SPECIAL.search(pattern):
        return 1
    _, group, tail = _first_group(pattern)
    return 1 if group is None else _num_alternatives(group) * num_expanded(tail)


def _num_alternatives(group: str) -> int:
    if match := _NUMBERS.fullmatch(group):
        first, last, step = match.groups()
        return len(_range(int(first), int(last), step))
    if match := _LETTERS.fullmatch(group):
        first, last, step = match.groups()
        return len(_range(_ALPHABET.index(first), _ALPHABET.index(last), step))
    return sum(map(num_expanded, _split(group)))


def expand_braces(pattern: str) -> Iterator[str]:
    r"""The texts that ``pattern`` stands for, as bash and webdataset expand it.

    ``{000..127}`` counts with leading zeros, ``{a..e}`` and ``{0..8..2}`` do what they look like, ``{train,val}``
    lists, and braces nest. A backslash takes away the meaning of what follows it.

    Raises:
        ConfigError: A brace has no partner.
    """
    if not _SPECIAL.search(pattern):
        yield pattern
        return
    head, group, tail = _first_group(pattern)
    head = _ESCAPE.sub(r"\1", head)
    if group is None:
        yield head
        return
    for middle in _alternatives(group):
        for rest in expand_braces(tail):
            yield head + middle + rest


def is_glob(url: str) -> bool:
    """Whether ``url`` has wildcards; a ``?`` or ``[`` in an HTTP URL is none."""
    return "*" in url or (("?" in url or "[" in url) and not url.startswith(("http://", "https://")))


@lru_cache(maxsize=2048)
def glob_regex(url: str) -> re.Pattern[str]:
    """Matches the URIs that the glob ``url`` stands for.

    ``*`` and ``?`` do not cross a slash, ``**`` as a whole component stands for any number of directories, and as in
    a shell no wildcard matches a dot at the start of a name.

    The time that matching takes grows with the product of both lengths, whatever the glob: what follows a wildcard, up
    to the next one, has a fixed width (in characters after ``*``, in directories after ``**``), so the first place
    where it fits is as good as any later one, and is never reconsidered. Only behind the last has the end to be met.

    Raises:
        ConfigError: The glob is longer than any name.
    """
    if len(url) > MAX_GLOB_CHARACTERS:
        raise ConfigError(
            f"the glob {url[:100]}… has {len(url)} characters, and a name has {MAX_GLOB_CHARACTERS} at most; shorten it"
        )
    *folders, last = url.split("/")
    if last == "**":
        folders, last = [*folders, "**"], "*"
    # What stands between two `**`, each directory with its slash; two of them in a row say no more than one.
    runs: list[list[str]] = [[]]
    for folder in folders:
        if folder != "**":
            runs[-1].append(f"(?>{_component(folder)}/)")
        elif runs[-1] or len(runs) == 1:
            runs.append([])
    directory = r"(?:(?!\.)[^/]*+/)"
    first, *middle = ["".join(run) for run in runs]
    text = first + "".join(f"(?>{directory}*?{run})" for run in middle[:-1])
    text += f"{directory}*{middle[-1]}" if middle else ""
    return re.compile(text + _component(last), re.DOTALL)


def _component(glob: str) -> str:
    """A regular expression for one name, to be followed by a slash or the end."""
    first, *others = _pieces(glob)
    start = r"(?!\.)" if glob[:1] in {"*", "?", "["} else ""
    between = "".join(f"(?>[^/]*?{piece})" for piece in others[:-1] if piece)
    return start + first + between + (f"[^/]*{others[-1]}" if others else "")


def _pieces(glob: str) -> list[str]:
    """What stands between the stars of ``glob``, each of a fixed width."""
    pieces: list[list[str]] = [[]]
    position = 0
    while position < len(glob):
        mark = glob[position]
        closing = glob.find("]", position + 2 + (glob[position + 1 : position + 2] == "!")) if mark == "[" else -1
        if mark == "*":
            pieces.append([])
        elif mark == "?":
            pieces[-1].append("[^/]")
        elif closing > 0:
            pieces[-1].append(_character_set(glob[position + 1 : closing]))
            position = closing
        else:
            pieces[-1].append(re.escape(mark))
        position += 1
    return ["".join(piece) for piece in pieces]


def _character_set(members: str) -> str:
    inverted = members.startswith("!")
    members = members[inverted:]
    parts, position = [], 0
    while position < len(members):
        first, last = members[position], members[position]
        if members[position + 1 : position + 2] == "-" and position + 2 < len(members):
            last = members[position + 2]
            position += 2
        if first <= last:  # a range the wrong way round holds nothing
            parts.append(f"{re.escape(first)}-{re.escape(last)}")
        position += 1
    if not parts:
        return "[^/]" if inverted else "(?!)"
    return f"(?!/)[{'^' * inverted}{''.join(parts)}]"


def _shown(urls: Sequence[str]) -> str:
    return ", ".join(url[:200] for url in urls[:3])


def _first_group(pattern: str) -> tuple[str, str | None, str]:
    """What stands before, in and behind the first pair of braces; no group if there is none."""
    depth = start = 0
    for match in _SPECIAL.finditer(pattern):
        mark = match[0]
        if mark == "{":
            start = match.start() if not depth else start
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth < 0:
                break
            if not depth:
                return pattern[:start], pattern[start + 1 : match.start()], pattern[match.end() :]
    if depth:
        raise ConfigError(
            f"the braces in {pattern!r} do not match; close them, or write a backslash before a brace that is meant "
            "as it stands"
        )
    return pattern, None, ""


def _alternatives(group: str) -> Iterator[str]:
    if match := _NUMBERS.fullmatch(group):
        first, last, step = match.groups()
        counted = any(re.match(r"-?0\d", text) for text in (first, last))
        width = max(len(first), len(last)) if counted else 0
        return (f"{number:0{width}d}" for number in _range(int(first), int(last), step))
    if match := _LETTERS.fullmatch(group):
        first, last, step = match.groups()
        return (_ALPHABET[at] for at in _range(_ALPHABET.index(first), _ALPHABET.index(last), step))
    parts = _split(group)
    if len(parts) == 1:
        return (f"{{{text}}}" for text in expand_braces(group))
    return chain.from_iterable(map(expand_braces, parts))


def _range(first: int, last: int, step: str | None) -> range:
    stride = int(step or 1) or 1
    return range(first, last + 1, stride) if first < last else range(first, last - 1, -stride)


def _split(group: str) -> list[str]:
    """The parts between the commas that stand in no inner braces."""
    parts, depth, start = [], 0, 0
    for match in _SPECIAL.finditer(group):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if match[0] == "," and not depth:
            parts.append(group[start : match.start()])
            start = match.end()
    return [*parts, group[start:]]
