"""torch's ``.metadata``, read without running what is in it."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from cacheloader.checkpoint.torch_metadata import entries, parse_metadata
from cacheloader.errors import CheckpointError
from tests.checkpoint.jobs import Job

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    job = Job()
    job.step()
    folder = tmp_path_factory.mktemp("dcp")
    state = {
        "model": job.model.state_dict(),
        "optimizer": get_optimizer_state_dict(job.model, job.optimizer),
        "half": torch.zeros(3, 2, dtype=torch.bfloat16),
        "plain": {"a": 1, "b": "text"},
    }
    dcp.save(state, checkpoint_id=folder)
    return folder


def test_the_record_is_what_torch_reads(written: Path) -> None:
    ours = parse_metadata((written / ".metadata").read_bytes())
    theirs = dcp.FileSystemReader(written).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    end = max(entry.offset + entry.length for entry in entries(ours))
    assert end == (written / "__0_0.distcp").stat().st_size


def test_a_record_torn_anywhere_is_refused(written: Path) -> None:
    whole = (written / ".metadata").read_bytes()
    for length in range(0, len(whole), 61):
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            parse_metadata(whole[:length])


class Trap:
    sprung = False

    def __reduce__(self) -> tuple[Any, ...]:
        return (spring, ())


def spring() -> None:
    Trap.sprung = True


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_code_in_a_record_is_not_run(protocol: int) -> None:
    buffer = io.BytesIO()
    pickle.dump(Trap(), buffer, protocol=protocol)
    with pytest.raises(CheckpointError, match=r"\.metadata (names|uses)"):
        parse_metadata(buffer.getvalue())
    assert not Trap.sprung


def reduced_by_name(member: Any, _protocol: int) -> tuple[Any, ...]:
    """As python 3.11.0 to 3.11.3 pickle every enum."""
    return getattr, (type(member), member.name)


def test_a_record_that_an_older_python_has_written_is_read(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = dcp.FileSystemReader(written).read_metadata()
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduced_by_name)
    data = pickle.dumps(record)
    assert b"getattr" in data
    assert parse_metadata(data).state_dict_metadata == record.state_dict_metadata


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, ["mro"]),
        (Metadata, "__init__"),
        (torch.Size, "numel"),
    ],
)
def test_no_attribute_but_a_member_of_torchs_enum_is_looked_up(kind: Any, name: Any) -> None:
    class Reduced:
        def __reduce__(self) -> tuple[Any, ...]:
            return getattr, (kind, name)

    with pytest.raises(CheckpointError, match=r"\.metadata"):
        parse_metadata(pickle.dumps(Reduced()))


def test_a_value_that_no_file_holds_is_named(written: Path) -> None:
    record = parse_metadata((written / ".metadata").read_bytes())
    gone = next(index for index in record.storage_data if index.fqn == "half")
    del record.storage_data[gone]
    with pytest.raises(CheckpointError, match="announces half and no file holds it"):
        entries(record)
