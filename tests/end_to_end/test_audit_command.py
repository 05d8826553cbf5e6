"""``cacheloader audit`` over what a real loader recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

import cacheloader as cl
from cacheloader.cli import main
from tests.support.shard_sets import ShardSet, key_and_digest

BATCH = 32

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def open_loader(shard_set: ShardSet, cache_dir: Path, records: Path, **options: Any) -> cl.DataLoader:
    dataset = cl.RemoteDataset(
        str(shard_set.folder), seed=5, cache_dir=cache_dir, cache_size="64MiB", transform=key_and_digest
    )
    return cl.DataLoader(dataset, batch_size=BATCH, collate_fn=list, record_to=records, **options)


def audit(records: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["audit", str(records), "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
def test_two_epochs_with_a_rollback_inside_the_process_are_in_order(
    shard_set: ShardSet, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    loader = open_loader(shard_set, cache_dir, tmp_path / "steps", record_keys=True, **options)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()
    for _ in range(3):
        next(batches)
    loader.load_state_dict(state)
    for _ in range(2):
        list(loader)
    status, answer = audit(tmp_path / "steps", capsys)
    assert (status, answer["findings"], answer["has_keys"]) == (0, [], True)
    assert [(e["epoch"], e["is_complete"], e["num_once"]) for e in answer["epochs"]] == [
        (0, True, 1024),
        (1, True, 1024),
    ]
    assert (answer["num_repeats"], answer["num_gaps"], answer["num_rolled_back"]) == (0, 0, 3)
    assert main(["audit", str(tmp_path / "steps")]) == 0
    assert "\n0 repeats, 0 gaps (each sample read was recorded and is the one due)" in capsys.readouterr().out


def test_batches_out_of_order_are_each_recorded_as_what_they_are(
    shard_set: ShardSet, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    list(open_loader(shard_set, cache_dir, tmp_path / "steps", record_keys=True, num_workers=2, in_order=False))
    assert audit(tmp_path / "steps", capsys)[0] == 0


def test_an_epoch_broken_off_for_the_next_is_a_finding_with_the_samples_named(
    shard_set: ShardSet, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = open_loader(shard_set, cache_dir, tmp_path / "steps")
    for _ in loader:
        break
    for _ in loader:
        break
    status, answer = audit(tmp_path / "steps", capsys)
    assert (status, answer["num_gaps"]) == (1, 1024 - BATCH)
    assert main(["audit", str(tmp_path / "steps")]) == 1
    printed = capsys.readouterr().out
    assert "epoch 0 ends at row 32, and 992 more were due" in printed
    assert "    sample 0 of file:///" in printed


def test_a_folder_without_records_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 2
    assert "holds no step records" in capsys.readouterr().err


def test_records_without_their_manifest_are_wrong_usage(
    shard_set: ShardSet, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    next(iter(open_loader(shard_set, cache_dir, tmp_path / "steps")))
    for path in (tmp_path / "steps").glob("manifest-*"):
        path.unlink()
    assert main(["audit", str(tmp_path / "steps")]) == 2
    assert "copy it to the records" in capsys.readouterr().err


def test_a_mixture_has_no_single_order_to_audit(shard_set: ShardSet, cache_dir: Path, tmp_path: Path) -> None:
    part = cl.RemoteDataset(str(shard_set.folder), seed=5, cache_dir=cache_dir, cache_size="64MiB")
    mixture = cl.Mixture({"all": (part, 1.0)})
    with pytest.raises(cl.errors.ConfigError, match="got a Mixture"):
        cl.DataLoader(mixture, batch_size=8, record_to=tmp_path / "steps")
