from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.order.mixture_record import (
    is_earlier_schedule,
    layout_text,
    manifests_text,
    schedule_text,
    sources_text,
    weights_text,
)
from cacheloader.order.mixture_schedule import WeightsFrom, normalised, phases_of
from cacheloader.order.mixture_shares import BLOCK_ROWS
from cacheloader.order.options import OrderOptions
from cacheloader.state import Position

from .cases import thorough

EIGHT = [f"source{i}" for i in range(8)]


def phases(*blocks: int, names="ab"):
    changes = [
        WeightsFrom(rows=block * BLOCK_ROWS, weights={name: 1 + block * i for i, name in enumerate(names)})
        for block in blocks
    ]
    return phases_of(dict.fromkeys(names, 1), changes, names=names, lanes=4)


def test_texts_of_small_mixtures_can_be_read():
    assert weights_text("ab", normalised({"a": 7, "b": 3}, names="ab")).startswith("a=0.7 b=0.3 #")
    assert manifests_text("ab", ["0" * 32, "1" * 32]) == "a=0000000000 b=1111111111"
    assert sources_text("ab", [OrderOptions(seed=5)] * 2) == "each(seed=5 window=8)"
    different = [OrderOptions(seed=5, redeal=0.5), OrderOptions(shuffle=False)]
    assert sources_text("ab", different) == "a(seed=5 window=8 redeal=0.5) b(seed=0 unshuffled)"
    assert schedule_text("ab", phases()) == ""
    assert schedule_text("ab", phases(2)).startswith("8192: a=0.25 b=0.75 #")


def test_texts_of_any_length_stay_short_and_differ():
    names = [f"{'x' * 30}é{i}" for i in range(300)]
    weights = [
        normalised({name: 1 + (i == special) for i, name in enumerate(names)}, names=names) for special in (3, 4)
    ]
    options = [[OrderOptions(seed=i % special) for i in range(300)] for special in (3, 4)]
    digests = [[f"{i % special:032x}" for i in range(300)] for special in (3, 4)]
    for one, other in (
        [weights_text(names, w) for w in weights],
        [sources_text(names, o) for o in options],
        [manifests_text(names, d) for d in digests],
        [schedule_text(names[:2], phases(*range(1, 60), last, names=names[:2])) for last in (70, 71)],
    ):
        assert one != other
        assert len(json.dumps(one)) < 200


def test_weights_that_look_alike_are_told_apart():
    texts = {weights_text("ab", normalised({"a": 1, "b": b}, names="ab")) for b in (1, 1.000000001)}

    assert len({text.split("#")[0] for text in texts}) == 1
    assert len(texts) == 2


@thorough
@given(
    st.lists(st.integers(1, 40), unique=True, min_size=0, max_size=3),
    st.lists(st.integers(1, 40), unique=True, min_size=0, max_size=3),
    st.integers(0, 41 * BLOCK_ROWS),
)
def test_a_schedule_may_grow_ahead_of_the_position_and_nowhere_else(old, added, row):
    saved = schedule_text("ab", phases(*old))
    now = phases(*{*old, *added})
    is_ahead = all(block * BLOCK_ROWS >= row for block in set(added) - set(old))

    assert is_earlier_schedule(saved, names="ab", phases=now, row=row) == is_ahead


@pytest.mark.parametrize("now", [phases(9), phases(3, 8), phases()])
def test_a_schedule_that_lost_or_changed_an_entry_is_another_one(now):
    assert not is_earlier_schedule(schedule_text("ab", phases(3, 9)), names="ab", phases=now, row=0)


def test_a_schedule_too_long_to_be_spelled_out_may_grow_at_its_end():
    saved = schedule_text("ab", phases(*range(1, 50)))
    assert "49 changes #" in saved

    grown = phases(*range(1, 51))
    assert is_earlier_schedule(saved, names="ab", phases=grown, row=50 * BLOCK_ROWS)
    assert not is_earlier_schedule(saved, names="ab", phases=grown, row=50 * BLOCK_ROWS + 1)
    assert not is_earlier_schedule(saved, names="ab", phases=phases(*range(2, 51)), row=0)


@pytest.mark.parametrize("names", [EIGHT, [f"{'é' * 50}{i}" for i in range(300)]])
def test_a_position_of_any_mixture_at_any_place_takes_less_than_a_kibibyte(names):
    order = {
        "seed": 2**64 - 1,
        "lanes": 10**5,
        "tail": "carry",
        "epoch_rows": 10**12,
        "weights": weights_text(names, normalised(dict.fromkeys(names, 1), names=names)),
        "schedule": schedule_text("ab", phases(*range(1, 60))),
        "sources": sources_text(
            names, [OrderOptions(seed=2**64 - 1 - i, redeal=0.123456789) for i in range(len(names))]
        ),
        "layout": layout_text([np.full(10**5, 10**8)] * 8),
        "order_version": 1,
        "mixture_version": 1,
    }
    digests = [f"{i:032x}" for i in range(len(names))]
    position = Position(manifest=manifests_text(names, digests), order=order, epoch=10**6, row=10**12)

    assert len(json.dumps(position.to_dict())) < 1024


def test_eight_sources_of_short_names_can_be_read_in_full():
    assert manifests_text(EIGHT, [f"{i:032x}" for i in range(8)]).startswith("source0=0000000000 source1=")
    assert weights_text(EIGHT, normalised(dict.fromkeys(EIGHT, 1), names=EIGHT)).startswith("source0=0.125 source1=")


def test_a_shard_that_moved_from_one_source_to_the_next_is_another_layout():
    one = layout_text([np.array([3, 4, 5]), np.array([6])])
    other = layout_text([np.array([3, 4]), np.array([5, 6])])

    assert one.startswith("4 shards, 18 samples, ")
    assert one != other
