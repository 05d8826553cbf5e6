"""One run of one contestant: ``python -m benchmarks.harness.child TASK.json RESULT.json``, started by the runner."""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness import free_memory
from benchmarks.harness.contestant import Task
from benchmarks.harness.measurement import Failure
from benchmarks.harness.meter import Meter

FAILURE = "failure"
"""The only key of a result file that tells of one."""


def resolve(name: str) -> Any:
    """The object that ``"package.module:name"`` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def main(task_path: str, result_path: str) -> int:
    """Run what the file says and write the measurement, or how it failed.

    Returns:
        The process's status.
    """
    order = json.loads(Path(task_path).read_text())
    task = Task.from_dict(order["task"])
    try:
        contestant = resolve(order["factory"])(**order["options"])
        contestant.prepare(task)
        if order["memory_bytes"]:
            free_memory.back(order["memory_bytes"])
        result, status = contestant.run(task, Meter(task)).to_dict(), 0
    except BaseException as error:  # noqa: BLE001  (whatever a library raises is what the report has to say)
        traceback.print_exc()
        result, status = {FAILURE: asdict(failure_of(error))}, 1
    Path(result_path).write_text(json.dumps(result))
    return status


def failure_of(error: BaseException) -> Failure:
    """The exception in one line: its first, and its last where they differ, as in torch's of a worker."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Failure(kind=type(error).__name__, message=" … ".join(dict.fromkeys(lines[:1] + lines[-1:])))


if __name__ == "__main__":
    ended = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's farewell: engines with threads of their own can abort in it after all work is done.
    os._exit(ended)
