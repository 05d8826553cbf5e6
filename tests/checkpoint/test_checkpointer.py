"""Saving and resuming in one process."""

from __future__ import annotations

import asyncio
import shutil
import signal
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import cacheloader as cl
from cacheloader.checkpoint import verify
from cacheloader.checkpoint.commit import COMMIT_FILE
from cacheloader.cli import main
from cacheloader.errors import CheckpointError, ConfigError, NoValidCheckpoint, SaveFailed
from tests.checkpoint.jobs import Job, flip_bit, saved, saves, truncate
from tests.support.seaweedfs import storage_options

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.counting_proxy import CountingProxy


@pytest.mark.parametrize("mode", ["sync", "thread"])
def test_a_resumed_job_goes_on_bit_for_bit(tmp_path: Path, mode: str) -> None:
    uninterrupted = saved(tmp_path / "a", steps=4, mode=mode).steps(5)
    job = Job(seed=99)
    with job.checkpointer(tmp_path / "a", mode=mode) as checkpoints:
        assert checkpoints.restore_latest() == 4
        assert checkpoints.committed_step == 4
    assert job.steps(5) == uninterrupted
    never_saved = Job()
    assert never_saved.steps(9)[4:] == uninterrupted, "saving changed the training"


def test_a_single_process_that_resumes_is_not_warned_that_it_is_alone(tmp_path: Path) -> None:
    saved(tmp_path, steps=1)
    with warnings.catch_warnings(), Job().checkpointer(tmp_path) as checkpoints:
        warnings.simplefilter("error")
        assert checkpoints.restore_latest() == 1


def test_a_job_without_saves_starts_at_step_0(tmp_path: Path) -> None:
    with Job().checkpointer(tmp_path / "none yet") as checkpoints:
        assert checkpoints.restore_latest() == 0


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_with_another_tools_checkpoints_alone_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (400, 500):
        dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / f"step-{step}")
    with Job().checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 0
    assert "2 of other tools, step-500 (torchtitan) first" in caplog.text
    assert "torch.distributed.checkpoint.load" in caplog.text


def test_a_save_before_the_first_step_restores_an_optimizer_without_state(tmp_path: Path) -> None:
    job = Job()
    with job.checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0)
    assert not job.optimizer.state, "saving made up an optimizer state"
    expected = job.steps(3)
    again = Job(seed=5)
    with again.checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 0
        assert checkpoints.committed_step == 0
    assert again.steps(3) == expected


def test_what_training_changes_after_save_has_returned_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    job = Job()
    with job.checkpointer(tmp_path) as checkpoints:
        job.step()
        before = [parameter.detach().clone() for parameter in job.model.parameters()]
        checkpoints.save(1)
        with torch.no_grad():
            for parameter in job.model.parameters():
                parameter.fill_(7)
    again = Job(seed=5)
    with again.checkpointer(tmp_path) as checkpoints:
        checkpoints.restore_latest()
    assert all(torch.equal(a, b) for a, b in zip(before, again.model.parameters(), strict=True))


def test_a_parameter_that_never_got_a_gradient_does_not_matter(tmp_path: Path) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(3, 3)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Partly()
        return model, torch.optim.Adam(model.parameters())

    def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
        loss = model.used(torch.ones(1, 2)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    model, optimizer = make()
    step(model, optimizer)
    with cl.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpoints:
        checkpoints.save(1)
    expected = [step(model, optimizer) for _ in range(3)]
    model, optimizer = make()
    with cl.Checkpointer(tmp_path, model=model, optimizer=optimizer) as checkpoints:
        checkpoints.restore_latest()
    assert [step(model, optimizer) for _ in range(3)] == expected


def test_more_modules_and_plain_objects_are_saved_by_their_names(tmp_path: Path) -> None:
    class Counter:
        value = 3

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value, "history": [1, 2.5, None, "x"], "tensor": torch.arange(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]
            assert state["history"] == [1, 2.5, None, "x"]
            assert state["tensor"].tolist() == [0, 1, 2]

    counter, average = Counter(), nn.Linear(2, 2)
    with cl.Checkpointer(tmp_path, model=nn.Linear(1, 1), counter=counter, average=average) as checkpoints:
        checkpoints.save(8)
    weight = average.weight.detach().clone()
    counter.value = 0
    nn.init.zeros_(average.weight)
    with cl.Checkpointer(tmp_path, model=nn.Linear(1, 1), counter=counter, average=average) as checkpoints:
        assert checkpoints.restore_latest() == 8
    assert counter.value == 3
    assert torch.equal(average.weight, weight)


def test_a_state_that_would_need_code_to_load_is_refused_at_the_first_save(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"path": Job}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    checkpoints = cl.Checkpointer(tmp_path, model=nn.Linear(1, 1), odd=Odd())
    with pytest.raises(ConfigError, match="the state of odd could not be loaded"):
        checkpoints.save(1)


@pytest.mark.parametrize("hurt", ["flip", "truncate", "remove", "record", "folder"])
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(tmp_path: Path, hurt: str) -> None:
    saved(tmp_path, steps=3)
    newest = saves(tmp_path)[-1]
    data = newest / "__0_0.distcp"
    if hurt == "flip":
        flip_bit(data, at=data.stat().st_size // 2)
        reason = "its bytes have changed"
    elif hurt == "truncate":
        truncate(data)
        reason = "bytes and was committed with"
    elif hurt == "remove":
        data.unlink()
        reason = "__0_0.distcp is missing"
    elif hurt == "folder":
        (newest / COMMIT_FILE).unlink()
        (newest / COMMIT_FILE).mkdir()
        reason = "no commit.json"
    else:
        truncate(newest / COMMIT_FILE, by=40)
        reason = "incomplete"
    job = Job(seed=5)
    with job.checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 2
    assert [skipped.name for skipped in checkpoints.skipped] == [newest.name]
    assert reason in checkpoints.skipped[0].reason


def test_sizes_alone_do_not_find_a_flipped_bit_and_cost_no_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = saved(tmp_path, steps=2)
    newest = saves(tmp_path)[-1]
    data, record = newest / "__0_0.distcp", newest / ".metadata"
    weight = job.model[0].weight.detach().numpy().tobytes()
    flip_bit(data, at=data.read_bytes().index(weight))
    read: list[str] = []
    real = verify._read_again
    monkeypatch.setattr(verify, "_read_again", lambda store, path: (read.append(path), real(store, path))[1])
    with Job().checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 1
    assert f"{newest.name}/{data.name}" in read
    read.clear()
    with Job().checkpointer(tmp_path, verify="sizes") as checkpoints:
        assert checkpoints.restore_latest() == 2
    assert read == []
    size = record.stat().st_size
    truncate(record)
    with Job().checkpointer(tmp_path, verify="sizes") as checkpoints:
        assert checkpoints.restore_latest() == 1
    assert f"{size:,}" in checkpoints.skipped[0].reason


def test_with_nothing_valid_left_the_error_is_loud_and_step_0_has_to_be_asked_for(tmp_path: Path) -> None:
    saved(tmp_path, steps=2)
    for folder in saves(tmp_path):
        flip_bit(folder / "__0_0.distcp", at=100)
    for start_over in ("never", "if_never_committed"):
        with Job().checkpointer(tmp_path, start_over=start_over) as checkpoints:
            with pytest.raises(NoValidCheckpoint, match=r"2 saves .* none can be resumed from") as caught:
                checkpoints.restore_latest()
            for folder in saves(tmp_path):
                assert folder.name in str(caught.value)
            with pytest.raises(ConfigError, match="restore_latest"):
                checkpoints.save(1)
    with Job().checkpointer(tmp_path, start_over="always") as checkpoints:
        assert checkpoints.restore_latest() == 0
        checkpoints.save(1)
    with Job().checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 1


def test_an_interrupted_first_save_is_an_error_unless_starting_over_was_allowed(tmp_path: Path) -> None:
    saved(tmp_path / "a", steps=1)
    half = tmp_path / "b" / saves(tmp_path / "a")[0].name
    half.mkdir(parents=True)
    (half / "__0_0.distcp").write_bytes(b"half")
    with Job().checkpointer(tmp_path / "b") as checkpoints, pytest.raises(NoValidCheckpoint, match=r"no commit\.json"):
        checkpoints.restore_latest()
    with Job().checkpointer(tmp_path / "b", start_over="if_never_committed") as checkpoints:
        assert checkpoints.restore_latest() == 0
        checkpoints.save(1)
    (saves(tmp_path / "b")[-1] / COMMIT_FILE).unlink()
    with (
        Job().checkpointer(tmp_path / "b", start_over="if_never_committed") as checkpoints,
        pytest.raises(NoValidCheckpoint),
    ):
        checkpoints.restore_latest()


def test_saving_over_an_earlier_attempt_that_was_not_restored_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, steps=1)
    with Job().checkpointer(tmp_path) as checkpoints, pytest.raises(ConfigError, match=r"restore_latest\(\)"):
        checkpoints.save(1)


def test_going_back_before_a_loss_spike_makes_the_later_saves_older(tmp_path: Path) -> None:
    saved(tmp_path, steps=4)
    job = Job()
    with job.checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest(max_step=2) == 2
        job.step()
        checkpoints.save(3)
    with Job().checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 3


def test_retention_keeps_the_newest_and_each_hundredth(tmp_path: Path) -> None:
    job = Job()
    with job.checkpointer(tmp_path, keep_last=2, keep_every=4) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step)
    assert [int(path.name.split("-")[2]) for path in saves(tmp_path)] == [4, 6, 7]


def test_two_jobs_in_one_folder_are_warned_of_and_do_not_delete_each_others_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, steps=1)
    begun = tmp_path / "000002-step-2-0123abcd"
    dead = tmp_path / "000002-step-2-deaddead"
    for folder in (begun, dead):
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(b"first part")
    with (
        Job().checkpointer(tmp_path, keep_last=1) as one,
        Job().checkpointer(tmp_path, keep_last=1) as other,
    ):
        one.restore_latest()
        other.restore_latest()
        (begun / "__1_0.distcp").write_bytes(b"second part, of a third job that is alive")
        for step in (11, 12):
            one.save(step)
            one.wait()
            other.save(step + 10)
            other.wait()
    assert sorted(int(path.name.split("-")[2]) for path in saves(tmp_path)) == [2, 12, 22]
    assert begun.exists()
    assert not dead.exists()
    assert f"another job is saving into {tmp_path}" in caplog.text
    assert begun.name in caplog.text


def test_a_save_that_failed_in_the_background_is_raised_by_the_next_and_training_can_go_on(tmp_path: Path) -> None:
    job = saved(tmp_path, steps=1)
    with job.checkpointer(tmp_path) as checkpoints:
        checkpoints.restore_latest()
        checkpoints._store = Full(checkpoints._store)
        checkpoints.save(2)
        with pytest.raises(SaveFailed, match=r"step 2 did not end in a commit.*No space left"):
            checkpoints.save(3)
        checkpoints._store = checkpoints._store.inner
        checkpoints.save(4)
        checkpoints.wait()
        assert checkpoints.committed_step == 4
    assert [int(path.name.split("-")[2]) for path in saves(tmp_path) if (path / COMMIT_FILE).exists()] == [1, 4]


def test_an_error_in_the_loop_is_told_before_the_save_under_way_is_waited_for(
    bucket: str,
    prefix: str,
    s3_proxy: CountingProxy,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, options = f"s3://{bucket}/{prefix}ckpt", storage_options(s3_proxy.url)
    told = "training failed (ZeroDivisionError: in step 2); waiting up to 60 s for the save of step 1"

    async def until_told(method: str, target: str) -> None:
        while told not in caplog.text:
            await asyncio.sleep(0.01)

    def train() -> None:
        job = Job()
        with job.checkpointer(url, storage_options=options) as checkpoints:
            job.step()
            monkeypatch.setattr(s3_proxy, "_delay", until_told)  # the store answers nothing before
            checkpoints.save(1)
            raise ZeroDivisionError("in step 2")

    with pytest.raises(ZeroDivisionError):
        train()
    assert told in caplog.text
    with Job().checkpointer(url, storage_options=options) as checkpoints:
        assert checkpoints.restore_latest() == 1


def test_a_job_whose_checkpoints_vanished_does_not_begin_at_step_0(tmp_path: Path) -> None:
    saved(tmp_path, steps=2)
    for folder in saves(tmp_path):
        shutil.rmtree(folder)
    for start_over in ("never", "if_never_committed"):
        with (
            Job().checkpointer(tmp_path, start_over=start_over) as checkpoints,
            pytest.raises(NoValidCheckpoint, match=r"once .*committed-once\.json"),
        ):
            checkpoints.restore_latest()
    with Job().checkpointer(tmp_path, start_over="always") as checkpoints:
        assert checkpoints.restore_latest() == 0


def test_a_job_whose_checkpoints_were_removed_on_demand_begins_at_step_0(tmp_path: Path) -> None:
    saved(tmp_path, steps=1)
    assert main(["ckpt", "rm", str(tmp_path), saves(tmp_path)[0].name, "--even-the-last"]) == 0
    with Job().checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 0


@pytest.mark.parametrize("step", [-1, 1.5, "7", None])
def test_a_step_that_no_restart_would_find_again_is_refused(tmp_path: Path, step: Any) -> None:
    with Job().checkpointer(tmp_path) as checkpoints, pytest.raises(ConfigError, match="whole number from 0"):
        checkpoints.save(step)
    assert not list(tmp_path.iterdir())


def test_a_step_may_be_a_number_of_numpy_or_torch(tmp_path: Path) -> None:
    with Job().checkpointer(tmp_path) as checkpoints:
        checkpoints.save(np.int64(3))  # type: ignore[arg-type]
        checkpoints.save(torch.tensor(4))  # type: ignore[arg-type]
    with Job().checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 4


def test_the_learning_rate_of_an_optimizer_without_state_is_restored(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> float:
        loss = model(torch.ones(1, 4)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss.item()

    model, optimizer, schedule = make()
    with cl.Checkpointer(tmp_path, model=model, optimizer=optimizer, schedule=schedule) as checkpoints:
        for _ in range(5):
            step(model, optimizer, schedule)
        checkpoints.save(5)
    expected = [step(model, optimizer, schedule) for _ in range(4)]
    model, optimizer, schedule = make()
    with cl.Checkpointer(tmp_path, model=model, optimizer=optimizer, schedule=schedule) as checkpoints:
        checkpoints.restore_latest()
    assert optimizer.param_groups[0]["lr"] == 0.0025
    assert [step(model, optimizer, schedule) for _ in range(4)] == expected
    adam = torch.optim.Adam(model.parameters())
    with (
        cl.Checkpointer(tmp_path, model=model, optimizer=adam, schedule=schedule) as checkpoints,
        pytest.raises(CheckpointError, match="does not fit optimizer"),
    ):
        checkpoints.restore_latest()


def test_the_account_hears_that_training_goes_on_after_a_save_that_was_refused(tmp_path: Path) -> None:
    job = Job()
    with cl.goodput.Run(tmp_path / "run") as run, job.checkpointer(tmp_path / "ckpt") as checkpoints:
        checkpoints._store = Full(checkpoints._store)
        checkpoints.save(1)
        with pytest.raises(SaveFailed):
            checkpoints.save(2)
        assert not run.is_saving


class Flaky:
    """A store whose reads of some files fail so many times: the real one, with errors as those of a tired network."""

    def __init__(self, inner: Any, *, times: int) -> None:
        self.inner = inner
        self.times = times

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def reading(self, path: str) -> Any:
        if path.endswith(".distcp") and self.times > 0:
            self.times -= 1
            raise OSError(5, "Input/output error")
        return self.inner.reading(path)


def test_a_read_error_that_passes_does_not_cost_the_newest_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "RETRIES_AFTER_S", (0.0, 0.0))
    saved(tmp_path, steps=2)
    with Job().checkpointer(tmp_path) as checkpoints:
        checkpoints._store = Flaky(checkpoints._store, times=2)
        assert checkpoints.restore_latest() == 2


def test_a_save_that_cannot_be_read_is_passed_over_loudly_and_retention_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verify, "RETRIES_AFTER_S", (0.0, 0.0))
    saved(tmp_path, steps=2)
    newest = saves(tmp_path)[-1]
    with Job().checkpointer(tmp_path, keep_last=1) as checkpoints:
        checkpoints._store = Flaky(checkpoints._store, times=3)
        assert checkpoints.restore_latest() == 1
        assert "cannot be read now" in checkpoints.skipped[0].reason
        assert f"passed over {newest.name}" in caplog.text
        checkpoints.save(7)
        checkpoints.save(8)
    assert [int(path.name.split("-")[2]) for path in saves(tmp_path)] == [2, 8]


class Full:
    """A store that is full after some bytes: the real one, whose streams fail as those of a full disk do."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def writing(self, path: str) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def writing() -> Any:
            with self.inner.writing(path) as stream:
                stream.write(b"first part")
                raise OSError(28, "No space left on device")
                yield

        return writing()


def test_a_checkpoint_of_another_model_is_refused_and_nothing_older_is_taken_instead(tmp_path: Path) -> None:
    saved(tmp_path, steps=1)
    with (
        cl.Checkpointer(tmp_path, model=nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))) as checkpoints,
        pytest.raises(CheckpointError, match=r"does not fit the model.*Size mismatch"),
    ):
        checkpoints.restore_latest()
    with (
        cl.Checkpointer(tmp_path, model=nn.Linear(8, 16)) as checkpoints,
        pytest.raises(CheckpointError, match="does not fit model: it lacks"),
    ):
        checkpoints.restore_latest()


def test_a_model_of_another_type_than_the_save_is_warned_of_by_its_first_parameter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with cl.Checkpointer(tmp_path, model=nn.Linear(3, 2)) as checkpoints:
        checkpoints.save(1)
    with cl.Checkpointer(tmp_path, model=nn.Linear(3, 2)) as checkpoints:
        checkpoints.restore_latest()
    assert "was saved as" not in caplog.text
    with cl.Checkpointer(tmp_path, model=nn.Linear(3, 2).bfloat16()) as checkpoints:
        assert checkpoints.restore_latest() == 1
    assert "model.weight was saved as torch.float32 and is loaded as torch.bfloat16, 1 more likewise" in caplog.text


def test_a_stop_signal_becomes_a_save_and_exit_status_75(tmp_path: Path) -> None:
    job, before = Job(), signal.getsignal(signal.SIGTERM)
    with job.checkpointer(tmp_path, stop_signal=signal.SIGTERM) as checkpoints:
        checkpoints.exit_if_stopped(0)
        job.step()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as left:
            checkpoints.exit_if_stopped(1)
    assert left.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == before
    with Job().checkpointer(tmp_path) as checkpoints:
        assert checkpoints.restore_latest() == 1


def test_wrong_options_are_refused_with_the_choices(tmp_path: Path) -> None:
    for options, words in (
        ({"mode": "fast"}, '"sync", "thread" or "process"'),
        ({"mode": "process"}, "init_process_group"),
        ({"verify": "no"}, "'bytes', 'sizes'"),
        ({"start_over": "yes"}, "if_never_committed"),
        ({"progress": Job().schedule}, "'progress' is used"),
        ({"thing": 3}, "no state_dict"),
        ({"keep_last": 0}, "keep_last=0"),
    ):
        with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
            cl.Checkpointer(tmp_path, model=nn.Linear(1, 1), **options)
