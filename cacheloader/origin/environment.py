"""The variables that steer a store's credential chain.

A private daemon outlives the job that started it and serves jobs with other credentials, so each job sends its own
variables along. A daemon that would mix them with those it was started with could read with the wrong rights.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")


def store_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of ``environ`` (default: this process) that a store looks at."""
    variables = os.environ if environ is None else environ
    return {name: value for name, value in variables.items() if name.startswith(_PREFIXES)}


def effective_environment(environment: Mapping[str, str] | None) -> dict[str, str]:
    """All variables as they hold for one data set.

    Args:
        environment: The client's store variables; they *replace* those of this process, so that a job without
            credentials does not read with another job's. ``None``: this process's own hold.
    """
    if environment is None:
        return dict(os.environ)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIXES)}
    return {**kept, **store_variables(environment)}


def forget_store_variables() -> None:
    """Remove the store variables from this process.

    A private daemon calls this before it starts a thread: some engines read the process environment themselves.
    """
    for name in store_variables():
        del os.environ[name]
