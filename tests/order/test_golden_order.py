"""The order as it was released. A failure here means that no saved position can be trusted any more.

If the change is meant, raise ``ORDER_VERSION`` and write the new values down.
"""

from __future__ import annotations

import numpy as np

from cacheloader.order.lanes import shard_order
from cacheloader.order.options import ORDER_VERSION, OrderOptions
from cacheloader.order.permutation import large_permutation, raw_words, small_permutation
from cacheloader.order.sample_order import SampleOrder

from .cases import pairs

KEY = 2**63 + 5


def test_the_values_below_belong_to_this_version_of_the_order():
    assert ORDER_VERSION == 1


def test_random_words():
    assert raw_words("shards", 17, count=4).tolist() == [
        0x2EB185180EBEB2AB,
        0x2F712A37391965D4,
        0x47A35BBF0DB5CF6D,
        0x795E314352A5A08F,
    ]
    assert raw_words("pieces", 17, 3, start=5, count=3).tolist() == [
        0x19AB5D32D9ACB353,
        0x97C3FE07FC5FA73A,
        0x9B6700580F1D7743,
    ]


def test_permutation_of_a_small_window():
    assert small_permutation(np.uint64(KEY), 12).tolist() == [1, 9, 3, 8, 2, 0, 5, 10, 6, 11, 7, 4]


def test_permutation_of_a_window_of_eight_million():
    went = large_permutation(
        np.arange(8) * 100_000,
        window=np.zeros(8, dtype=np.int64),
        size=np.array([8_000_000]),
        key=np.array([KEY], dtype=np.uint64),
    )

    assert went.tolist() == [7249809, 1281115, 1320992, 7738071, 1919572, 1858434, 6540847, 3200654]


def test_shards_end_to_end_before_and_after_some_epochs_of_redealing():
    options = OrderOptions(seed=17, lanes=3, redeal=0.5)

    # fmt: off
    assert shard_order(24, options=options, epoch=0).tolist() == [
        14, 5, 22, 0, 1, 9, 6, 21, 19, 2, 4, 11, 12, 3, 10, 20, 18, 8, 17, 23, 13, 15, 16, 7,
    ]
    assert shard_order(24, options=options, epoch=3).tolist() == [
        10, 7, 6, 5, 21, 16, 1, 11, 0, 15, 4, 9, 12, 17, 20, 3, 13, 8, 18, 22, 19, 2, 23, 14,
    ]
    # fmt: on


def test_two_epochs_of_a_small_data_set():
    order = SampleOrder(np.array([5, 0, 3, 7, 1, 6]), OrderOptions(seed=17, lanes=2, shuffle_window=2, tail="keep"))
    epochs = [
        [pairs(order.batch(epoch=epoch, row=row, global_batch=6, rank=0, world_size=1)) for row in range(0, 11, 3)]
        for epoch in (0, 1)
    ]

    assert epochs == [
        [
            [(0, 2), (0, 0), (0, 4), (4, 0), (2, 1), (3, 4)],
            [(0, 1), (0, 3), (5, 3), (2, 2), (3, 6), (3, 0)],
            [(5, 4), (5, 5), (5, 0), (3, 5), (2, 0), (3, 2)],
            [(5, 1), (5, 2), (3, 1), (3, 3)],
        ],
        [
            [(5, 0), (5, 3), (5, 4), (3, 4), (3, 1), (3, 0)],
            [(5, 2), (5, 1), (5, 5), (3, 5), (3, 3), (3, 6)],
            [(0, 3), (0, 4), (0, 1), (3, 2), (4, 0), (2, 2)],
            [(0, 2), (0, 0), (2, 1), (2, 0)],
        ],
    ]


def test_a_batch_in_the_middle_of_a_large_data_set():
    order = SampleOrder(np.arange(20_000, 21_000), OrderOptions(seed=17, lanes=8))
    batch = order.batch(epoch=2, row=1_234_567, global_batch=16, rank=1, world_size=2)

    assert batch.lane.tolist() == [4, 4, 5, 5, 6, 6, 7, 7]
    assert batch.shard.tolist() == [884, 104, 913, 99, 765, 173, 384, 25]
    assert batch.sample.tolist() == [1547, 12076, 3570, 6489, 20755, 13565, 16800, 19474]
