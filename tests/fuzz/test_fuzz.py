"""The short form of the fuzz run; ``python -m tests.fuzz`` is the long one."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import ProtocolError
from cacheloader.protocol import frames
from tests.fuzz.attack import Attack
from tests.fuzz.frames_of_chaos import FrameMaker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.timeout(300)
def test_a_daemon_under_fire_lives_serves_others_stays_level_and_tells_each_offender(tmp_path: Path) -> None:
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    report = Attack(tmp_path, seed=seed).run(4000)
    # How many offend is chance, six hundred or so. Two hundred would be the least if every eighth connection, whose
    # frames are the mild ones, sent all that it may.
    assert report.offenders >= report.no_requests > 200
    assert report.failures["ConfigError"] + report.failures["ProtocolError"] > 0, "requests got past the decoder"
    assert report.bystander_reads >= 8


@pytest.mark.parametrize("decode", [frames.decode_request, frames.decode_reply, frames.decode_spec])
@given(seed=st.integers(0, 2**32))
def test_whatever_is_decoded_becomes_a_message_or_a_typed_error(decode: Callable[[bytes], object], seed: int) -> None:
    maker = FrameMaker(seed)
    for data in (maker.frame().data, maker.spec(["/a.tar"])):
        with contextlib.suppress(ProtocolError):
            decode(data)


def test_equal_seeds_make_equal_frames() -> None:
    one, other = FrameMaker(5), FrameMaker(5)
    assert [one.frame() for _ in range(100)] == [other.frame() for _ in range(100)]
