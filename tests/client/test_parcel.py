"""What a worker sends through a shared block arrives as it was, and the block is free again when it should be."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import OrderedDict, namedtuple
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from cacheloader.blocks import Blocks
from cacheloader.parcel import Parcel
from tests.support.descriptors import links_of, open_fds

Pair = namedtuple("Pair", "left right")

LARGE = 100_000


def sent(data: Any, blocks: Blocks) -> Any:
    """Through a pickle, as through torch's queue."""
    return ForkingPickler.loads(ForkingPickler.dumps(Parcel.packed(data, blocks, worker=0)))


def through(data: Any, blocks: Blocks) -> Any:
    parcel = sent(data, blocks)
    return parcel.unpacked() if isinstance(parcel, Parcel) else parcel


def used(blocks: Blocks) -> int:
    gc.collect()
    return int(blocks._used.sum())


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert torch.equal(got.view(torch.uint8) if got.numel() and got.dim() else got, _raw(expected))
    elif isinstance(expected, np.ndarray):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert got.tobytes() == expected.tobytes()
        assert got.flags.writeable
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for name in expected:
            assert_same(got[name], expected[name])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() and tensor.dim() else tensor


@pytest.fixture
def blocks() -> Blocks:
    return Blocks(num_workers=1, per_worker=2)


ARRAYS = npst.arrays(
    st.sampled_from(["<f4", "<i8", "?", "<c8", "<M8[s]", "S3", "<U2", [("a", "<i2"), ("b", "<f8")]]).map(np.dtype),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
)
TENSORS = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]).flatmap(
    lambda dtype: st.lists(st.integers(0, 5), max_size=3).map(lambda shape: (torch.rand(shape) * 7).to(dtype))
)
LEAVES = st.one_of(
    st.integers(),
    st.text(),
    st.none(),
    st.binary(max_size=700),
    st.integers(500, 3000).map(bytes),
    st.integers(500, 3000).map(bytearray),
    ARRAYS,
    TENSORS,
)
TREES = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.dictionaries(st.text(max_size=4), parts, max_size=4),
        st.dictionaries(st.text(max_size=4), parts, max_size=4).map(OrderedDict),
        st.tuples(parts, parts),
        st.tuples(parts, parts).map(lambda pair: Pair(*pair)),
        st.lists(st.binary(max_size=900), max_size=6),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=100)
@given(TREES)
def test_whatever_a_batch_is_made_of_it_arrives_with_the_same_types_and_values(data: Any) -> None:
    blocks = Blocks(num_workers=1, per_worker=1)
    got = through(data, blocks)
    assert_same(got, data)
    del got
    assert not blocks._used.any()


def test_memory_layouts_arrive_as_they_were(blocks: Blocks) -> None:
    images = torch.rand(4, 3, 50, 50).to(memory_format=torch.channels_last)
    columns = np.asfortranarray(np.random.default_rng(0).random((200, 300)))
    got_images, got_columns = through((images, columns), blocks)
    assert got_images.stride() == images.stride()
    assert torch.equal(got_images, images)
    assert got_columns.flags.f_contiguous
    assert np.array_equal(got_columns, columns)


def test_what_appears_twice_in_a_batch_is_one_object_on_the_other_side(blocks: Blocks) -> None:
    array = np.arange(LARGE)
    row = [array]
    row.append(row)
    got = through({"a": array, "row": row}, blocks)
    assert got["a"] is got["row"][0]
    assert got["row"][1] is got["row"]


class Special(torch.Tensor):
    pass


def test_objects_with_ways_of_their_own_stay_in_the_pipe_and_the_rest_does_not(blocks: Blocks) -> None:
    masked = np.ma.masked_array(np.arange(4), mask=[0, 1, 0, 0])
    leaf = torch.ones(3, requires_grad=True)
    special = torch.ones(5).as_subclass(Special)
    objects = np.array([1, "two"], dtype=object)
    data = {"image": torch.zeros(LARGE), "masked": masked, "leaf": leaf, "special": special, "objects": objects}
    got = through(data, blocks)
    assert got["image"].shape == (LARGE,)
    assert got["masked"].mask.tolist() == [False, True, False, False]
    assert got["leaf"].requires_grad
    assert type(got["special"]) is Special
    assert got["objects"].tolist() == [1, "two"]


def test_a_small_batch_takes_no_block(blocks: Blocks) -> None:
    assert Parcel.packed({"label": 3, "text": "cat", "raw": b"short"}, blocks, worker=0) == {
        "label": 3,
        "text": "cat",
        "raw": b"short",
    }
    assert used(blocks) == 0


def test_the_pipe_carries_little_of_a_large_batch(blocks: Blocks) -> None:
    data = {"raw": [bytes(LARGE)] * 64, "image": torch.zeros(64, 3, 64, 64)}
    assert len(bytes(ForkingPickler.dumps(Parcel.packed(data, blocks, worker=0)))) < 2000


def test_a_block_of_bytes_is_free_at_once_and_one_of_arrays_when_the_last_view_is_gone(blocks: Blocks) -> None:
    raw = through([bytes(LARGE)], blocks)
    assert used(blocks) == 0
    array, tensor = through((np.arange(LARGE), torch.arange(LARGE)), blocks)
    view, kept = array[10:20], tensor[5:]
    del array, tensor
    assert used(blocks) == 1
    del view
    assert used(blocks) == 1
    assert kept[0] == 5
    del kept
    assert used(blocks) == 0
    assert len(raw[0]) == LARGE


def test_a_label_does_not_keep_the_block_of_its_images(blocks: Blocks) -> None:
    batch = through({"image": torch.zeros(LARGE), "label": torch.arange(64)}, blocks)
    label = batch["label"]
    del batch
    assert used(blocks) == 0
    assert label.tolist() == list(range(64))


def test_a_consumer_that_keeps_every_batch_gets_the_later_ones_in_torchs_own_way(blocks: Blocks) -> None:
    batches = [through(torch.full((LARGE,), number), blocks) for number in range(5)]
    assert [int(batch[7]) for batch in batches] == list(range(5))
    assert used(blocks) == 2
    del batches
    assert used(blocks) == 0


def test_a_batch_larger_than_the_block_enlarges_it_and_views_of_the_smaller_one_stay_good(blocks: Blocks) -> None:
    for size in (LARGE, 30 * LARGE, 10, 60 * LARGE):
        small, large = through(torch.full((size,), 1.0), blocks), through(torch.full((2 * size,), 2.0), blocks)
        assert float(small.sum()) == size
        assert float(large.sum()) == 4 * size


def test_a_batch_that_finds_no_memory_travels_in_torchs_own_way(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    data = {"raw": [bytes(LARGE)]}
    assert Parcel.packed(data, blocks, worker=0) is data
    assert used(blocks) == 0


def test_a_parcel_that_is_dropped_unread_frees_its_block(blocks: Blocks) -> None:
    parcel = sent(np.zeros(LARGE), blocks)
    assert used(blocks) == 1
    del parcel
    assert used(blocks) == 0


def test_a_forked_child_that_ends_frees_nothing_of_its_parent(blocks: Blocks) -> None:
    kept = through(np.zeros(LARGE), blocks)

    def drop() -> None:
        nonlocal kept
        del kept
        gc.collect()

    child = multiprocessing.get_context("fork").Process(target=drop)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert used(blocks) == 1
    assert not kept.any()


def test_blocks_leave_no_descriptor_behind() -> None:
    def use() -> None:
        blocks = Blocks(num_workers=2, per_worker=3)
        through(np.zeros(LARGE), blocks)

    def held() -> int:
        gc.collect()
        return sum("memfd:cacheloader-b" in link for link in links_of(os.getpid()))

    use()
    before, blocks_before = open_fds(), held()
    for _ in range(100):
        use()
    assert held() <= blocks_before
    # What each use left would be a hundred. Threads of earlier tests, torch's that hands tensors over among them, may
    # hold a descriptor or two for a moment, before or now.
    assert open_fds() < before + 10
