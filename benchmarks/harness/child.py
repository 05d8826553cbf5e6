"""One run of one contestant: ``python -m benchmarks.harness.child TASK.json RESULT.json``, started by the runner."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness.contestant import Task
from benchmarks.harness.meter import Meter


def resolve(name: str) -> Any:
    """The object that ``"package.module:name"`` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def main(task_path: str, result_path: str) -> None:
    """Run what the file says and write the measurement."""
    order = json.loads(Path(task_path).read_text())
    task = Task.from_dict(order["task"])
    contestant = resolve(order["factory"])(**order["options"])
    contestant.prepare(task)
    measurement = contestant.run(task, Meter(task))
    Path(result_path).write_text(json.dumps(measurement.to_dict()))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's farewell: engines with threads of their own can abort in it after all work is done.
    os._exit(0)
