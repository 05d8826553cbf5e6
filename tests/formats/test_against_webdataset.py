"""Shards from every packer around, read by cacheloader and by the webdataset package, sample by sample."""

from __future__ import annotations

import gc
import random
import shutil
import subprocess
import tarfile
import warnings
from pathlib import Path

import pytest
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheloader.errors import CorruptShard
from tests.support.tars import packed, read_all, read_all_as_webdataset

LONG = "long/" + "d" * 120
VERY_LONG = "/".join(["e" * 90] * 4)
NAMES = [
    "000.jpg",
    "000.cls",
    "0.1.seg.png",
    "dir.with.dots/a.jpg",
    "dir.with.dots/a.JSON",
    "nested/deep/er/b.tar.gz",
    "nested/deep/er/noextension",
    "größe/日本語.txt",
    "größe/日本語.cls",
    f"{LONG}/c.jpg",
    f"{LONG}/c.cls",
    f"{VERY_LONG}/d.jpg",
    f"{VERY_LONG}/d.cls",
    "__meta__/info.json",
    ".hidden",
    "sub/.hidden",
    "name with space.txt",
    "empty.bin",
]
SHORT_NAMES = [name for name in NAMES if len(name.encode()) < 100]


def content(name: str) -> bytes:
    return b"" if name.startswith("empty") else random.Random(name).randbytes(len(name) * 97 % 3000 + 1)


@pytest.mark.parametrize("archive_format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("mtime", [0, 1234.5])
def test_shards_by_tarfile(archive_format, mtime):
    shard = packed([(name, content(name)) for name in NAMES], format=archive_format, mtime=mtime)
    assert read_all(shard) == read_all_as_webdataset(shard)
    assert len(read_all(shard)) == 10


def test_shards_by_tarfile_in_ustar():
    shard = packed([(name, content(name)) for name in [*SHORT_NAMES, f"{LONG}/c.jpg"]], format=tarfile.USTAR_FORMAT)
    assert read_all(shard) == read_all_as_webdataset(shard)
    assert any(sample["__key__"] == f"{LONG}/c" for sample in read_all(shard))


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
@pytest.mark.parametrize("archive_format", ["gnu", "oldgnu", "pax", "posix", "ustar", "v7"])
@pytest.mark.parametrize("listed", ["as a directory", "by name"])
def test_shards_by_gnu_tar(tmp_path, archive_format, listed):
    names = SHORT_NAMES if archive_format in {"ustar", "v7"} else NAMES
    for name in names:
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(name))
    (tmp_path / "tree" / "link.jpg").symlink_to("000.jpg")
    (tmp_path / "tree" / "same.jpg").hardlink_to(tmp_path / "tree" / "000.jpg")
    members = ["--sort=name", "."] if listed == "as a directory" else names
    command = ["tar", f"--format={archive_format}", "-C", tmp_path / "tree", "-cf", tmp_path / "shard.tar", *members]
    subprocess.run(command, check=True, timeout=100)
    shard = (tmp_path / "shard.tar").read_bytes()
    samples = read_all(shard)
    assert samples == read_all_as_webdataset(shard)
    prefix = "./" if listed == "as a directory" else ""
    assert f"{prefix}dir.with.dots/a" in [sample["__key__"] for sample in samples]
    assert sum(len(sample) - 1 for sample in samples) >= len(names) - 5


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
def test_sparse_files_of_gnu_tar_are_refused(tmp_path):
    for archive_format in ("gnu", "pax"):
        with open(tmp_path / "hole.bin", "wb") as file:
            file.truncate(1 << 20)
            file.write(b"x")
        command = ["tar", f"--format={archive_format}", "--sparse", "-C", tmp_path, "-cf", tmp_path / "s.tar"]
        subprocess.run([*command, "hole.bin"], check=True, timeout=100)
        with pytest.raises(CorruptShard, match="sparse"):
            read_all((tmp_path / "s.tar").read_bytes())


def read_files_as_webdataset(paths):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # webdataset leaves its files to the garbage collector
        samples = [dict(sample) for sample in wds.WebDataset(paths, shardshuffle=False)]
        gc.collect()
    for sample in samples:
        del sample["__url__"]
        sample.pop("__local_path__", None)
    return samples


@pytest.mark.parametrize("writer_name", ["TarWriter", "ShardWriter"])
def test_shards_by_webdataset_itself(tmp_path, writer_name):
    if writer_name == "TarWriter":
        writer = wds.TarWriter(str(tmp_path / "shard-000000.tar"))
    else:
        writer = wds.ShardWriter(str(tmp_path / "shard-%06d.tar"), maxcount=7, verbose=0)
    with writer:
        for i in range(20):
            writer.write(
                {"__key__": f"part.{i % 3}/{i:05d}", "JPG": content(str(i)), "cls": i, "meta.json": {"i": i, "ü": "ß"}}
            )
    paths = sorted(str(path) for path in tmp_path.glob("*.tar"))
    assert len(paths) == (1 if writer_name == "TarWriter" else 3)
    ours = [sample for path in paths for sample in read_all(Path(path).read_bytes())]
    assert ours == read_files_as_webdataset(paths)
    assert len(ours) == 20
    assert set(ours[0]) == {"__key__", "jpg", "cls", "meta.json"}


name_parts = st.text(alphabet="ab.Ä_-", min_size=1, max_size=5).filter(lambda part: part not in {".", ".."})
member_names = st.lists(name_parts, min_size=1, max_size=3).map("/".join) | st.just("x" * 150 + ".jpg")
trees = st.lists(
    st.tuples(member_names, st.binary(max_size=20) | st.integers(0, 3).map(lambda n: b"z" * (512 * n))), max_size=12
)


def outcome(read, shard):
    try:
        return read(shard)
    except (ValueError, CorruptShard) as error:
        if "duplicate file name" in str(error) or "second field" in str(error):
            return "a field twice"
        raise


@given(trees, st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
@settings(max_examples=200)
def test_any_tree_reads_as_in_webdataset(tree, archive_format):
    shard = packed(tree, format=archive_format)
    assert outcome(read_all, shard) == outcome(read_all_as_webdataset, shard)


WHOLE = packed([(name, content(name)) for name in NAMES], format=tarfile.PAX_FORMAT)


@given(st.integers(0, len(WHOLE)))
@settings(max_examples=300)
def test_a_shard_that_is_cut_off_is_refused_or_read_as_far_as_it_goes(size_bytes):
    whole = read_all(WHOLE)
    try:
        samples = read_all(WHOLE[:size_bytes])
    except CorruptShard:
        return
    assert size_bytes % 512 == 0 or samples == whole
    assert samples == read_all_as_webdataset(WHOLE[:size_bytes])
    assert samples[:-1] == whole[: len(samples) - 1]
    if samples:  # the last one may lack fields, never have wrong ones
        assert samples[-1].items() <= whole[len(samples) - 1].items()
