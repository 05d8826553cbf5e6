"""The blocks of docs/loaders.md, run as they stand: interrupted at any step, they deliver one sequence."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers.trainer_utils import get_last_checkpoint

import cacheloader as cl
from tests.support.memory_sets import MemorySets

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).parents[2] / "docs" / "loaders.md"
URL = "s3://bucket/imagenet/"
SHARDS = (300, 417, 250, 0, 331, 520, 303)  # 2121 samples: 8 batches of 256 and a rest
NUM_EPOCHS = 3
NUM_STEPS = 8 * NUM_EPOCHS

# Warnings of foreign libraries about machines without accelerators, few cores, and each other's old names.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


class Killed(Exception):
    """Raised by a training step in place of a kill."""


def decode(sample: dict[str, Any], rng: Any) -> dict[str, Any]:
    """The sample's number, and a draw in place of an augmented image."""
    return {"number": int(sample["__key__"].replace("-", "")), "pixels": torch.rand(1) + float(rng.random())}


class Journal:
    """What a training loop got, and when it dies."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[int], list[float]]] = []
        self.lives_for = NUM_STEPS + 1

    def take(self, batch: dict[str, torch.Tensor]) -> None:
        if not self.lives_for:
            raise Killed
        self.lives_for -= 1
        self.batches.append((batch["number"].tolist(), batch["pixels"].flatten().tolist()))


class PlainModel(torch.nn.Module):
    """Nearly nothing to train, in the shape that HF's Trainer asks for."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self._journal = journal

    def forward(self, number: torch.Tensor, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        self._journal.take({"number": number, "pixels": pixels})
        return {"loss": self.linear(pixels).mean()}


class LightningModel(lightning.LightningModule):
    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self._journal = journal

    def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
        self._journal.take(batch)
        return self.linear(batch["pixels"]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def names_for(heading: str, journal: Journal, folder: Path) -> dict[str, Any]:
    """What a block finds in its namespace."""
    names: dict[str, Any] = {"cl": cl, "torch": torch, "decode": decode, "folder": folder, "path": folder / "state.pt"}
    match heading:
        case "Lightning":
            silent = ("enable_progress_bar", "enable_model_summary", "logger")
            return names | {
                "lightning": lightning,
                "ModelCheckpoint": ModelCheckpoint,
                "model": LightningModel(journal),
                "quiet": {"accelerator": "cpu", "default_root_dir": folder} | dict.fromkeys(silent, False),
            }
        case "Hugging Face Trainer":
            return names | {
                "transformers": transformers,
                "get_last_checkpoint": get_last_checkpoint,
                "json": json,
                "Path": Path,
                "model": PlainModel(journal),
                "quiet": {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"},
            }
    model = PlainModel(journal)

    def train(batch: dict[str, torch.Tensor]) -> None:
        model(**batch)
        names["step"] += 1

    names |= {
        "Accelerator": Accelerator,
        "StatefulDataLoader": StatefulDataLoader,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "train": train,
        "step": len(journal.batches),
    }
    return names


_BLOCK = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = dict(_BLOCK.findall(DOCUMENT.read_text()))


@pytest.fixture(scope="module", autouse=True)
def shards() -> Iterator[None]:
    with MemorySets().installed() as sets:
        sets.add(URL, SHARDS)
        yield


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], list[float]]]:
    journal = Journal()
    loader = cl.DataLoader(cl.RemoteDataset(URL, transform=decode), batch_size=256)
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            journal.take(batch)
    return journal.batches


def live(heading: str, journal: Journal, folder: Path) -> None:
    """One life of the job: the block, until it ends or a step kills it."""
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._shared_state.clear()
    names = names_for(heading, journal, folder)
    with warnings.catch_warnings(action="ignore"):
        try:
            exec(compile(BLOCKS[heading], str(DOCUMENT), "exec"), names)
        except Killed:
            assert not journal.lives_for


def test_the_document_has_a_block_for_each_loop() -> None:
    assert list(BLOCKS) == [
        "cacheloader.DataLoader",
        "torch's DataLoader",
        "torchdata's StatefulDataLoader",
        "Lightning",
        "accelerate",
        "Hugging Face Trainer",
    ]


@pytest.mark.parametrize("kills", [[5, 2], [7, 1, 8, 1]], ids=str)
@pytest.mark.parametrize("heading", list(BLOCKS))
def test_a_block_killed_in_mid_epoch_and_at_its_edges_delivers_what_an_uninterrupted_run_does(
    heading: str, kills: list[int], tmp_path: Path, expected: list[tuple[list[int], list[float]]]
) -> None:
    journal = Journal()
    for lives_for in [*kills, NUM_STEPS + 1]:
        journal.lives_for = lives_for
        live(heading, journal, tmp_path)
    assert journal.batches == expected
