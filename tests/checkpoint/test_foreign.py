"""What other tools write, written by those tools, as ``cacheloader ckpt ls --verify`` sees it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from cacheloader.checkpoint.cli import Row, rows
from cacheloader.checkpoint.store import FolderStore
from cacheloader.cli import main
from tests.checkpoint.jobs import flip_bit, saved, saves, truncate

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.timeout(300)]


def looked(folder: Path) -> list[Row]:
    return rows(FolderStore(folder), read_bytes=True)


def reasons(folder: Path) -> dict[str, str]:
    return {row.name: row.reason for row in looked(folder)}


def inside_largest_record(path: Path) -> int:
    """A byte in the middle of the largest tensor of an archive."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        record = max(archive.infolist(), key=lambda info: info.file_size)
        with archive.open(record) as stream:
            head = stream.read(32)
    return path.read_bytes().index(head) + 5


@pytest.fixture(scope="module")
def trainer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": torch.arange(4), "labels": torch.arange(4)}

    config = transformers.GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    folder = tmp_path_factory.mktemp("trainer")
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_total_limit=5,
    )
    transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=Data()).train()
    return folder


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_the_hugging_face_trainer(trainer_folder: Path) -> None:
    found = looked(trainer_folder)
    assert [(row.name, row.kind, row.step, row.reason) for row in found] == [
        ("checkpoint-4", "hf trainer", 4, ""),
        ("checkpoint-2", "hf trainer", 2, ""),
    ]
    optimizer = trainer_folder / "checkpoint-4" / "optimizer.pt"
    flip_bit(optimizer, at=inside_largest_record(optimizer))
    truncate(trainer_folder / "checkpoint-2" / "model.safetensors")
    assert "optimizer.pt has a record with a wrong checksum" in reasons(trainer_folder)["checkpoint-4"]
    assert "its header describes" in reasons(trainer_folder)["checkpoint-2"]
    older = trainer_folder / "checkpoint-2"
    truncated = older / "model.safetensors"
    truncated.write_bytes(truncated.read_bytes() + b"\0")
    (older / "trainer_state.json").unlink()
    assert "trainer_state.json, which is written last" in reasons(trainer_folder)["checkpoint-2"]


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def training_step(self, batch: Any) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    callback = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    trainer = lightning.Trainer(
        max_steps=4,
        callbacks=[callback],
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader([torch.zeros(64)] * 4))
    found = looked(tmp_path)
    assert [(row.kind, row.step, row.reason, row.proof) for row in found] == [
        ("lightning", 4, "", "checksums"),
        ("lightning", 2, "", "checksums"),
    ]
    newest, oldest = (tmp_path / row.name for row in found)
    flip_bit(newest, at=inside_largest_record(newest))
    truncate(oldest, by=1000)
    assert "wrong checksum" in reasons(tmp_path)[newest.name]
    assert "is torn" in reasons(tmp_path)[oldest.name]


def test_checkpoints_as_torchtitan_lays_them_out(tmp_path: Path) -> None:
    for step in (10, 20):
        dcp.save({"model": {"w": torch.ones(100)}, "step": step}, checkpoint_id=tmp_path / f"step-{step}")
    (tmp_path / "step-30").mkdir()
    (tmp_path / "step-30" / "__0_0.distcp").write_bytes(b"begun")
    found = looked(tmp_path)
    assert [(row.name, row.kind, row.step) for row in found] == [
        (f"step-{step}", "torchtitan", step) for step in (30, 20, 10)
    ]
    assert "no .metadata" in found[0].reason
    assert found[1].reason == found[2].reason == ""


def test_a_sharded_safetensors_model_with_a_shard_missing_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = tmp_path / "model"
    model.mkdir()
    save_file({"a": torch.ones(3)}, model / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names model-00002-of-00002.safetensors, which is missing" in reasons(tmp_path)["model"]
    save_file({"b": torch.ones(3)}, model / "model-00002-of-00002.safetensors")
    [row] = looked(tmp_path)
    assert (row.kind, row.reason, row.proof) == ("hf", "", "sizes")


def test_the_command_lists_verifies_and_removes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "job")
    assert main(["ckpt", "ls", url]) == 0
    assert "no checkpoints" in capsys.readouterr().out
    saved(tmp_path / "job", steps=4)
    names = [path.name for path in saves(tmp_path / "job")]
    assert main(["ckpt", "ls", url, "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == names[::-1]
    data = tmp_path / "job" / names[3] / "__0_0.distcp"
    flip_bit(data, at=os.stat(data).st_size // 2)
    assert main(["ckpt", "ls", url]) == 0, "sizes do not tell"
    capsys.readouterr()
    assert main(["ckpt", "ls", url, "--verify"]) == 1
    assert "its bytes have changed" in capsys.readouterr().out
    assert main(["ckpt", "verify", url, names[2]]) == 0
    assert main(["ckpt", "verify", url, "no such"]) == 1
    capsys.readouterr()
    assert main(["ckpt", "rm", url, "--keep-last", "2", "--dry-run"]) == 0
    assert capsys.readouterr().out.split() == ["would", "remove", names[0]], "the damaged one does not count as kept"
    assert main(["ckpt", "rm", url, names[0]]) == 0
    assert [path.name for path in saves(tmp_path / "job")] == names[1:]
    assert main(["ckpt", "rm", url, *names[1:]]) == 1
    assert "last checkpoint" in capsys.readouterr().err
    assert len(saves(tmp_path / "job")) == 3
    assert main(["ckpt", "rm", url]) == 2
    assert main(["ckpt", "rm", url, *names[1:], "--even-the-last"]) == 0
    assert saves(tmp_path / "job") == []


def test_the_last_checkpoint_whose_bytes_are_right_is_not_removed_for_a_newer_one_with_a_flipped_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, steps=3)
    names = [path.name for path in saves(tmp_path)]
    flip_bit(tmp_path / names[2] / "__0_0.distcp", at=500)
    assert main(["ckpt", "rm", str(tmp_path), "--keep-last", "1"]) == 0
    assert [path.name for path in saves(tmp_path)] == names[1:]
    assert main(["ckpt", "rm", str(tmp_path), names[1]]) == 1
    assert f"{names[1]} is the last checkpoint" in capsys.readouterr().err
    assert main(["ckpt", "rm", str(tmp_path), names[2]]) == 0
    assert [path.name for path in saves(tmp_path)] == names[1:2]


def test_what_is_no_checkpoint_is_not_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, steps=1)
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").write_text("years of work")
    for name in ("papers", "committed-once.json"):
        assert main(["ckpt", "rm", str(tmp_path), name, "--even-the-last"]) == 1
        assert f"{name} is no checkpoint" in capsys.readouterr().err
        assert (tmp_path / name).exists()


def test_the_only_checkpoint_of_another_tool_is_removed_on_demand_only(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "step-10")
    assert main(["ckpt", "rm", str(tmp_path), "step-10"]) == 1
    assert main(["ckpt", "rm", str(tmp_path), "step-10", "--even-the-last"]) == 0
    assert not (tmp_path / "step-10").exists()


def test_a_folder_that_cannot_be_listed_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    (tmp_path / "file").write_text("no folder")
    unknown = ["--storage-options", '{"keyy": "x"}']
    for arguments, words in (
        (["ls", "s3://bucket/ckpt"], "credentials"),
        (["verify", "s3://bucket/ckpt", *unknown], "keyy"),
        (["rm", str(tmp_path / "file"), "--keep-last", "1"], "Not a directory"),
    ):
        assert main(["ckpt", *arguments]) == 1
        error = capsys.readouterr().err
        assert words in error
        assert "cannot be listed" in error
        assert len(error.splitlines()) == 1


def test_verifying_a_folder_that_is_not_there_fails_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "verify", str(tmp_path / "mistyped")]) == 1
    assert "mistyped holds no checkpoint, or is not there" in capsys.readouterr().err
