"""The blocks of docs/checkpoints.md, run as they stand: killed and resumed, they deliver one sequence."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

import cacheloader as cl
from cacheloader.checkpoint.newest import newest_whole
from cacheloader.errors import NoValidCheckpoint
from tests.foreign import test_loaders_document as loaders
from tests.foreign.test_loaders_document import Journal, Killed, decode
from tests.support.memory_sets import MemorySets

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"
_BLOCK = re.compile(r"^##?#? ([^\n]+)\n(?:(?!^#).)*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = dict(_BLOCK.findall("#" + DOCUMENT.read_text()))

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def shards() -> Iterator[None]:
    with MemorySets().installed() as sets:
        sets.add(loaders.URL, loaders.SHARDS)
        yield


def live(heading: str, journal: Journal, folder: Path) -> None:
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._shared_state.clear()
    names = loaders.names_for(heading, journal, folder)
    dataset = cl.RemoteDataset(loaders.URL, transform=decode)
    names |= {"dataset": dataset, "loader": cl.DataLoader(dataset, batch_size=256)}
    block = BLOCKS[heading]
    if heading == "Hugging Face Trainer":
        before, _, _ = loaders.BLOCKS[heading].partition("trainer = Trainer(")
        block = before + block
    block = block.replace("s3://bucket/run-7/ckpt", str(folder)).replace("step % 100", "step % 1")
    with warnings.catch_warnings(action="ignore"):
        try:
            exec(compile(block, str(DOCUMENT), "exec"), names)
        except Killed:
            assert not journal.lives_for


@pytest.mark.parametrize("heading", ["Checkpoints", "accelerate", "Lightning", "Hugging Face Trainer"])
def test_a_block_killed_and_resumed_delivers_what_an_uninterrupted_run_does(heading: str, tmp_path: Path) -> None:
    expected = Journal()
    loader = cl.DataLoader(cl.RemoteDataset(loaders.URL, transform=decode), batch_size=256)
    for _ in range(loaders.NUM_EPOCHS):
        for batch in loader:
            expected.take(batch)
    journal = Journal()
    for lives_for in (5, 6, loaders.NUM_STEPS + 1):
        journal.lives_for = lives_for
        live(heading, journal, tmp_path)
    assert journal.batches == expected.batches


def test_a_torn_checkpoint_of_another_tool_is_passed_over_and_nothing_whole_is_an_error(tmp_path: Path) -> None:
    import torch

    assert newest_whole(tmp_path) is None
    for step in (1, 2):
        torch.save({"x": torch.ones(100)}, tmp_path / f"epoch=0-step={step}.ckpt")
    assert newest_whole(tmp_path) == f"{tmp_path}/epoch=0-step=2.ckpt"
    (tmp_path / "epoch=0-step=2.ckpt").write_bytes(b"torn")
    assert newest_whole(tmp_path) == f"{tmp_path}/epoch=0-step=1.ckpt"
    (tmp_path / "epoch=0-step=1.ckpt").write_bytes(b"")
    with pytest.raises(NoValidCheckpoint, match="none is whole"):
        newest_whole(tmp_path)
