"""The peers, as contestants of a scenario: where their data lies, which interpreter runs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from benchmarks.harness.runner import ROOT, Entry
from benchmarks.peers.environments import ENVIRONMENTS

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.harness.contestant import Store, Task
    from benchmarks.harness.packing import PackedShards
    from benchmarks.harness.store import RunningStore


CONVERSION_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One peer in one configuration.

    Attributes:
        label: Its name in tables, without the number of workers.
        module: In ``benchmarks.peers``.
        loader: Class in that module.
        options: Keyword arguments of it.
        environment: Which of the peers' environments; "" for that of the benchmarks.
        converts: Whether the module writes its own copy of the data set, run as a script.
    """

    label: str
    module: str
    loader: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: str = ""
    converts: bool = False

    @property
    def is_there(self) -> bool:
        """Whether its environment has been made."""
        return not self.environment or ENVIRONMENTS[self.environment].is_made

    @property
    def python(self) -> str:
        """Interpreter that has its library."""
        return str(ENVIRONMENTS[self.environment].python) if self.environment else sys.executable

    def named(self, num_workers: int) -> str:
        """Its label with a number of workers."""
        return f"{self.label}, {num_workers} workers"

    def entry(self, task: Task, *, script: str) -> Entry:
        """It, following a script such as ``epochs:Epochs``."""
        options = {"loader": f"benchmarks.peers.{self.module}:{self.loader}", "options": self.options}
        return Entry(
            label=self.named(task.num_workers),
            factory=f"benchmarks.contestants.{script}",
            options=options,
            task=task,
            python=self.python,
            is_peer=True,
        )

    def store(self, tars: Store, *, packed: PackedShards, running: RunningStore, folder: Path) -> Store:
        """Where its copy of the data set lies, which is written and uploaded if it needs one of its own.

        Args:
            tars: Where the tars lie.
            packed: The tars on disk.
            running: The store.
            folder: Empty directory for the copy.
        """
        if not self.converts:
            return tars
        target = folder / self.module
        folder.mkdir(parents=True, exist_ok=True)
        command = [self.python, "-m", f"benchmarks.peers.{self.module}", str(packed.folder), str(target)]
        subprocess.run(
            command,
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=CONVERSION_TIMEOUT_S,
        )
        prefix = f"{self.module}/"
        size_bytes = running.upload_folder(target, prefix)
        shutil.rmtree(target)
        return replace(tars, prefix=prefix, size_bytes=size_bytes)


WEBDATASET = Rival(
    label="webdataset cache_dir", module="webdataset", loader="WebdatasetLoader", options={"cached": True}
)
WEBDATASET_STREAM = Rival(
    label="webdataset streaming", module="webdataset", loader="WebdatasetLoader", options={"cached": False}
)
STREAMING = Rival(
    label="mosaicml-streaming", module="streaming", loader="StreamingLoader", environment="streaming", converts=True
)
LITDATA = Rival(label="litdata", module="litdata", loader="LitdataLoader", environment="litdata", converts=True)
FSSPEC = Rival(label="fsspec filecache", module="fsspec_cache", loader="FsspecLoader")
CONNECTOR = Rival(
    label="s3torchconnector streaming",
    module="s3torchconnector",
    loader="ConnectorLoader",
    environment="s3torchconnector",
)
HF_DATASETS = Rival(
    label="HF datasets streaming", module="hf_datasets", loader="DatasetsLoader", environment="hf_datasets"
)
ENERGON = Rival(label="energon", module="energon", loader="EnergonLoader", environment="energon", converts=True)

CACHING = (WEBDATASET, STREAMING, LITDATA, FSSPEC, ENERGON)
STREAMERS = (WEBDATASET_STREAM, CONNECTOR, HF_DATASETS)


def missing(rivals: tuple[Rival, ...]) -> list[str]:
    """A sentence for the report about each that has no environment here."""
    return [
        f"{rival.label} did not take part: its environment was not made (python -m benchmarks.peers.environments)."
        for rival in rivals
        if not rival.is_there
    ]
