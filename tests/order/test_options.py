from __future__ import annotations

import dataclasses

import pytest

from cacheloader.errors import ConfigError
from cacheloader.order.options import OrderOptions


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
        ({"seed": 1.5}, "seed=1.5"),
        ({"lanes": 0}, "lanes=0"),
        ({"lanes": True}, "lanes=True"),
        ({"shuffle": 1}, "shuffle=1"),
        ({"shuffle_window": 0}, "shuffle_window=0"),
        ({"tail": "cut"}, "tail='cut'"),
        ({"redeal": -0.1}, "redeal=-0.1"),
        ({"redeal": 0.001}, "redeal=0.001"),
        ({"redeal": float("nan")}, "redeal=nan"),
        ({"redeal": 1.1}, "redeal=1.1"),
        ({"shuffle": False, "lanes": 2}, "lanes=2"),
        ({"shuffle": False, "redeal": 0.5}, "redeal=0.5"),
    ],
)
def test_an_option_that_cannot_work_is_named_with_its_value_and_the_way_out(wrong, named):
    with pytest.raises(ConfigError) as caught:
        OrderOptions(**wrong)

    assert named in str(caught.value)
    assert "pass" in str(caught.value)


def test_defaults_are_one_lane_shuffled_and_sticky():
    assert dataclasses.asdict(OrderOptions()) == {
        "seed": 0,
        "lanes": 1,
        "shuffle": True,
        "shuffle_window": 8,
        "tail": "drop",
        "redeal": 0.0,
    }
