"""Fresh interpreters for our own modules, wherever this process found them, and safe from what else lies around."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from cacheloader.errors import DaemonUnavailable


def command(module: str, *arguments: str) -> list[str]:
    """The command line of ``python -m module arguments…``, to be run with ``PYTHONPATH`` set to ``search_path``."""
    # -P: the working directory is no place to import from; a file random.py there would break the child.
    return [sys.executable, "-P", "-m", module, *arguments]


def search_path(module: str) -> str:
    """``PYTHONPATH`` with which a fresh interpreter finds ``module`` and ``cacheloader`` where this one does.

    Raises:
        DaemonUnavailable: The package of ``module`` is not installed.
    """
    roots: list[Path] = []
    for package in ("cacheloader", module.partition(".")[0]):
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise DaemonUnavailable(f"{module} cannot be started: the package {package} is not installed")
        roots.append(Path(spec.origin).parent.parent)
    # The interpreter finds its site-packages by itself; named here they would come before the standard library.
    roots = [root for root in roots if root.name not in ("site-packages", "dist-packages")]
    roots += [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys(str(root.absolute()) for root in roots))
