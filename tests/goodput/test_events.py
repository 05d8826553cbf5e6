"""What a training process writes, and what a reader makes of it after a crash."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

import cacheloader as cl
from cacheloader.errors import ConfigError
from cacheloader.goodput import events, recorder
from cacheloader.goodput.command import Reader
from cacheloader.goodput.folder import EventFolder
from cacheloader.goodput.recorder import Recorder

if TYPE_CHECKING:
    from pathlib import Path


def run_in(folder: Path, **options: Any) -> cl.goodput.Run:
    return cl.goodput.Run(folder, rank=0, world_size=1, **options)


def read(folder: Path) -> list[Any]:
    return EventFolder(folder).read()


def of(found: list[Any], kind: type) -> list[Any]:
    return [event for event in found if isinstance(event, kind)]


def test_each_batch_is_a_step_that_ends_when_the_next_is_asked_for(tmp_path: Path) -> None:
    with run_in(tmp_path, attempt="a") as run:
        for batch in run.timed(range(3), tokens=7, samples=2):
            time.sleep(0.002 * batch)
    steps = of(read(tmp_path), events.Step)
    assert [(step.step, step.tokens, step.samples) for step in steps] == [(1, 7, 2), (2, 7, 2), (3, 7, 2)]
    assert steps[2].dur_s >= 0.004
    assert all(0 <= step.fetch_s < step.dur_s for step in steps)


def test_several_batches_make_one_step_where_the_loop_says_so(tmp_path: Path) -> None:
    with run_in(tmp_path, every_batch=False) as run:
        for number, _ in enumerate(run.timed(range(6), samples=4), start=1):
            if number % 3 == 0:
                run.step(tokens=100)
    assert [(step.step, step.samples, step.tokens) for step in of(read(tmp_path), events.Step)] == [
        (1, 12, 100),
        (2, 12, 100),
    ]


def test_a_step_that_an_error_ended_was_not_completed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_in(tmp_path) as run:
        assert all(1 // (1 - batch) for batch in run.timed(range(3)))
    found = read(tmp_path)
    assert [step.step for step in of(found, events.Step)] == [1]
    (end,) = of(found, events.AttemptEnd)
    assert end.code == 1
    assert "ZeroDivisionError" in end.cause
    assert not of(found, events.RunEnd)


def test_batches_of_an_evaluation_are_no_steps(tmp_path: Path) -> None:
    with run_in(tmp_path) as run:
        for _ in run.timed(range(2)):
            with run.eval():
                assert len(list(run.timed(range(10)))) == 10
    found = read(tmp_path)
    assert [step.step for step in of(found, events.Step)] == [1, 2]
    assert [phase.phase for phase in of(found, events.PhaseEnd)] == ["eval", "eval"]


def test_a_restore_before_the_run_is_open_is_recorded_with_its_own_time_and_counts(tmp_path: Path) -> None:
    before_ns = time.monotonic_ns()
    recorder.restore("step-40", 40, skipped=[("step-60", "truncated")], world_old=4)
    between_ns = time.monotonic_ns()
    with run_in(tmp_path) as run:
        list(run.timed(range(1)))
    found = read(tmp_path)
    (restore,) = of(found, events.Restore)
    assert (restore.step, restore.skipped, restore.world_old) == (40, (("step-60", "truncated"),), 4)
    assert before_ns <= restore.mono_ns <= between_ns
    assert [step.step for step in of(found, events.Step)] == [41]


def test_events_of_checkpoints_come_from_any_thread(tmp_path: Path) -> None:
    with run_in(tmp_path) as run, ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: recorder.ckpt_commit(f"step-{n}", n, size_bytes=n), range(200)))
        assert run.recorder.path.exists()
    found = read(tmp_path)
    assert sorted(event.step for event in of(found, events.CkptCommit)) == list(range(200))
    assert sorted(event.seq for event in found) == list(range(len(found)))


def test_a_torn_last_line_changes_nothing_and_the_next_attempt_of_the_file_goes_on_behind_it(tmp_path: Path) -> None:
    first = Recorder(tmp_path, attempt="a", rank=0, world_size=1)
    first.emit("membership", n_devices=4)
    first.close()
    with first.path.open("ab") as file:
        file.write(b'{"ev":"membership","seq":1,"wall')
    assert len(read(tmp_path)) == 1
    second = Recorder(tmp_path, attempt="a", rank=0, world_size=1)
    second.emit("membership", n_devices=5)
    second.close()
    folder = EventFolder(tmp_path)
    assert [(event.n_devices, event.seq) for event in folder.read()] == [(4, 0), (5, 2)]
    assert len(folder.damaged) == 1


def test_a_second_reading_reads_what_is_new_and_a_line_in_the_making_later(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, attempt="a", rank=0, world_size=1)
    folder = EventFolder(tmp_path)
    writer.emit("membership", n_devices=1)
    assert len(folder.read()) == 1
    assert folder.read() == []
    line = events.encode(
        events.Membership(v=1, run="r", att="a", node="n", rank=0, world=1, seq=1, wall_ns=1, mono_ns=1, n_devices=2)
    )
    with writer.path.open("ab") as file:
        file.write(line[:30])
        file.flush()
        assert folder.read() == []
        file.write(line[30:])
    assert [event.n_devices for event in folder.read()] == [2]
    writer.close()


def test_blocks_of_any_size_give_the_same_events_and_the_same_damaged_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Recorder(tmp_path, attempt="a", rank=0, world_size=1)
    for number in range(1, 41):
        writer.emit("membership" if number % 7 else "from.the.future", n_devices=number)
        if number == 20:
            with writer.path.open("ab") as file:
                file.write(b"no json\n\n")
    writer.close()
    found = []
    for size_bytes in (1, 97, 1000, 2**20):
        monkeypatch.setattr("cacheloader.goodput.folder.BLOCK_BYTES", size_bytes)
        folder = EventFolder(tmp_path)
        found.append(([event.seq for event in folder.read()], folder.damaged))
    assert len(found[0][0]) == 35
    assert len(found[0][1]) == 1
    assert found[0][1][0].split(":")[1] == "21"
    assert all(answer == found[0] for answer in found)


def test_a_full_file_is_sealed_and_the_next_goes_on_with_the_numbers(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, attempt="a", rank=3, world_size=4, segment_bytes=2000)
    for number in range(40):
        writer.emit("membership", n_devices=number)
    writer.close()
    assert len(list(tmp_path.glob("*.jsonl"))) > 3
    again = Recorder(tmp_path, attempt="a", rank=3, world_size=4, segment_bytes=2000)
    again.emit("membership", n_devices=40)
    again.close()
    found = read(tmp_path)
    assert sorted(event.seq for event in found) == list(range(41))
    assert {event.n_devices for event in found} == set(range(41))


def test_a_torn_line_at_the_end_of_the_second_file_costs_no_other_line(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, attempt="a", rank=0, world_size=1, segment_bytes=600)
    for step in range(1, 7):
        writer.write("step", f',"step":{step},"dur_s":0.1')
    writer.close()
    with writer.path.open("ab") as file:
        file.write(b'{"ev":"step","to')
    again = Recorder(tmp_path, attempt="a", rank=0, world_size=1, segment_bytes=600)
    assert again.path == writer.path != tmp_path / f"{recorder.stem('a', 0)}.jsonl"
    again.write("step", ',"step":7,"dur_s":0.1')
    again.close()
    assert sorted(event.step for event in EventFolder(tmp_path).read()) == [1, 2, 3, 4, 5, 6, 7]


def test_an_unknown_event_is_skipped_and_an_unknown_version_is_refused(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, attempt="a", rank=0, world_size=1)
    writer.emit("weather", sky="blue")
    writer.emit("membership", n_devices=1)
    writer.close()
    assert len(read(tmp_path)) == 1
    line = json.loads(writer.path.read_text().splitlines()[1])
    writer.path.write_text(json.dumps(line | {"v": 2}) + "\n")
    with pytest.raises(ConfigError, match=r"format version 2.*release that wrote it"):
        read(tmp_path)


def test_an_empty_folder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no goodput events.*cl\.goodput\.Run"):
        read(tmp_path)


def test_a_forked_child_writes_nothing_into_its_parents_file(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, attempt="a", rank=0, world_size=1)
    child = os.fork()
    if child == 0:
        try:
            writer.emit("membership", n_devices=1)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    writer.emit("membership", n_devices=2)
    writer.close()
    assert [event.n_devices for event in read(tmp_path)] == [2]


@pytest.mark.parametrize(
    ("field", "value"),
    [("mono_ns", 2**63), ("wall_ns", 2**64), ("seq", 10**30), ("step", 2**63), ("dur_s", 1e300), ("coll_us", [2**63])],
)
def test_a_number_that_no_account_can_hold_damages_its_line_and_no_other(
    tmp_path: Path, field: str, value: Any
) -> None:
    with run_in(tmp_path) as run:
        list(run.timed(range(3)))
    (path,) = tmp_path.glob("events-*.jsonl")
    lines = path.read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if '"dur_s"' in line)
    lines[place] = json.dumps({**json.loads(lines[place]), field: value})
    path.write_text("\n".join(lines) + "\n")
    reader = Reader(tmp_path)
    (damaged,) = reader.report()["damaged_lines"]
    assert field in damaged or "out of range" in damaged
    assert [step.step for step in of(read(tmp_path), events.Step)] == [2, 3]
