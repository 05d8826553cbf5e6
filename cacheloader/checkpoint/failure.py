"""What an error says in one line. Without torch, so that the command line starts without it."""

from __future__ import annotations


def innermost(error: BaseException) -> str:
    """What went wrong in one line; torch reports a failure of several ranks as a map from rank to error."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = min(failures.items())
        return f"rank {rank}: {type(wrapped[0]).__name__}: {wrapped[0]}".splitlines()[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
