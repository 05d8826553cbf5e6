from __future__ import annotations

import json
import logging
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheloader.errors import DatasetError, OriginDenied, OriginUnavailable
from cacheloader.manifest.asking import PatientOrigin
from cacheloader.manifest.record import Manifest, ShardInfo
from cacheloader.manifest.sidecar import check_count, counts_beside, sidecar_text, write_sidecar
from cacheloader.origin.transfer import TransferLimits
from tests.support.memory_origin import MemoryOrigin

B = "mem://bucket/set/"
BRIEF = TransferLimits(deadline_s=0.1)
SHARDS = ("train/0.tar", "train/1.tar", "val/0.tar")


def origin_with(**files: str | bytes) -> MemoryOrigin:
    objects = {B + name: name.encode() for name in SHARDS}
    return MemoryOrigin(
        objects | {B + name: text if isinstance(text, bytes) else text.encode() for name, text in files.items()}
    )


async def counted(origin: MemoryOrigin, *names: str) -> dict[str, int]:
    patient = PatientOrigin(origin)
    shards = [await origin.stat(B + name) for name in names or SHARDS]
    return {uri.removeprefix(B): count for uri, count in (await counts_beside(shards, patient)).items()}


WIDS = {"wids_version": 1, "shardlist": [{"url": name, "nsamples": 7 + i} for i, name in enumerate(SHARDS)]}
ALL = {"train/0.tar": 7, "train/1.tar": 8, "val/0.tar": 9}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("shards.json", json.dumps(WIDS)),
        ("shards.json", json.dumps(WIDS["shardlist"])),
        ("shards.json", json.dumps(ALL)),
        ("shards.json", json.dumps({f"./{name}": count for name, count in ALL.items()})),
        ("shards.json", json.dumps({B + name: count for name, count in ALL.items()})),
        ("sizes.json", json.dumps(ALL)),
        (".nv-meta/.info.json", json.dumps({"energon_version": "7", "shard_counts": ALL})),
        (".nv-meta/.info.yaml", "shard_counts:\n  train/0.tar: 7\n  train/1.tar: 8\n  val/0.tar: 9\n"),
    ],
)
async def test_every_known_shape_gives_its_counts(file, text):
    assert await counted(origin_with(**{file: text})) == ALL


async def test_a_file_beside_the_shards_names_them_from_there():
    files = {"train/shards.json": '{"0.tar": 1, "1.tar": 2}', "val/sizes.json": '{"0.tar": 3, "__len__": 3}'}
    assert await counted(origin_with(**files)) == {"train/0.tar": 1, "train/1.tar": 2, "val/0.tar": 3}


async def test_energons_file_is_found_one_directory_above_the_shards():
    origin = origin_with(**{".nv-meta/.info.json": json.dumps({"shard_counts": ALL})})
    assert await counted(origin, "train/0.tar", "train/1.tar") == {"train/0.tar": 7, "train/1.tar": 8}


async def test_a_file_that_was_copied_with_the_shards_from_another_store_still_counts():
    text = json.dumps({"shardlist": [{"url": "s3://old/place/0.tar", "nsamples": 4}]})
    assert await counted(origin_with(**{"val/shards.json": text}), "val/0.tar") == {"val/0.tar": 4}


async def test_what_cacheloader_wrote_goes_before_what_others_wrote():
    files = {"train/shards.json": '{"0.tar": 1}', "train/sizes.json": '{"0.tar": 2, "1.tar": 3}'}
    assert await counted(origin_with(**files), "train/0.tar", "train/1.tar") == {"train/0.tar": 1, "train/1.tar": 3}


async def test_files_of_img2dataset_count_each_shard_for_itself():
    origin = origin_with(
        **{f"{name[:-4]}_stats.json": f'{{"count": 99, "successes": {i}}}' for i, name in enumerate(SHARDS)}
    )
    assert await counted(origin) == {"train/0.tar": 0, "train/1.tar": 1, "val/0.tar": 2}


async def test_without_files_nothing_is_known_at_the_cost_of_few_questions():
    origin = MemoryOrigin({f"{B}{i:04d}.tar": b"" for i in range(1000)})
    shards = [await origin.stat(uri) for uri in list(origin.objects)]
    origin.asked.clear()
    assert await counts_beside(shards, PatientOrigin(origin)) == {}
    assert sum(origin.asked.values()) <= 9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "no list of sample counts"),
        ("[1, 2]", "no list of sample counts"),
        ('{"train/0.tar": "many"}', "no list of sample counts"),
        ('{"train/0.tar": -1}', "no list of sample counts"),
        ('{"train/0.tar": true}', "no list of sample counts"),
        ('{"shardlist": [{"url": "train/0.tar"}]}', "no list of sample counts"),
        ('{"shardlist": 5}', "no list of sample counts"),
        ("[" * 100_000, "no list of sample counts"),
        (b"\xff\xfe\x00", "no list of sample counts"),
        ('{"other.tar": 5}', "names 0 of 3 shards"),
        ('[{"url": "val/0.tar", "nsamples": 1}, {"url": "./val/0.tar", "nsamples": 2}]', "has two counts"),
        ('[{"url": "val/0.tar", "nsamples": 1, "filesize": 99}]', "is out of date"),
    ],
)
async def test_a_file_that_does_not_fit_is_passed_over_with_a_warning(caplog, text, said):
    with caplog.at_level(logging.WARNING):
        assert await counted(origin_with(**{"shards.json": text})) == {}
    assert said in caplog.text
    assert B + "shards.json" in caplog.text


async def test_a_file_that_names_some_of_the_shards_counts_those(caplog):
    assert await counted(origin_with(**{"shards.json": '{"val/0.tar": 5}'})) == {"val/0.tar": 5}
    assert "names 1 of 3 shards" in caplog.text


async def test_a_yaml_file_that_would_run_code_is_passed_over(caplog):
    text = "shard_counts: !!python/object/apply:os.getcwd []\n"
    assert await counted(origin_with(**{".nv-meta/.info.yaml": text})) == {}
    assert "no list of sample counts" in caplog.text


async def test_without_pyyaml_a_yaml_file_is_passed_over(caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert await counted(origin_with(**{".nv-meta/.info.yaml": "shard_counts: {val/0.tar: 1}"})) == {}
    assert "PyYAML is not installed" in caplog.text


async def test_a_forbidden_file_is_no_file_but_a_failing_store_fails():
    origin = origin_with()
    origin.fail(OriginDenied("no"), verb="stat", uri=B + "shards.json")
    assert await counted(origin) == {}
    origin.fail(OriginUnavailable("away"), verb="stat", uri=B + "shards.json", times=1000)
    with pytest.raises(OriginUnavailable):
        await counts_beside([await origin.stat(B + "val/0.tar")], PatientOrigin(origin, stranger=BRIEF, familiar=BRIEF))


def manifest(counts: dict[str, int]) -> Manifest:
    rows = [ShardInfo(uri=uri, size_bytes=len(uri), version="v", num_samples=count) for uri, count in counts.items()]
    return Manifest.build(rows, format="webdataset", origin_id="mem://bucket")


shard_names = st.lists(st.text('ab.ü"\\ ', min_size=1, max_size=5), min_size=1, max_size=2).map("/".join)


@given(st.dictionaries(shard_names, st.integers(0, 10**12), min_size=1, max_size=5))
async def test_what_was_written_is_read_back(counts):
    counts = {f"{B}{name}.tar": count for name, count in counts.items()}
    origin = MemoryOrigin({uri: uri.encode() for uri in counts})
    shards = [await origin.stat(uri) for uri in counts]
    text = sidecar_text(
        Manifest.build(
            [ShardInfo(uri=i.uri, size_bytes=i.size_bytes, version="", num_samples=counts[i.uri]) for i in shards],
            format="webdataset",
            origin_id="mem://bucket",
        ),
        directory=B,
    )
    origin.objects[B + "shards.json"] = text.encode()
    assert await counts_beside(shards, PatientOrigin(origin)) == counts


def test_a_written_file_has_the_shape_of_wids_and_names_each_shard_once(tmp_path):
    uris = [
        f"file://{tmp_path}/a.tar",
        f"file://{tmp_path}/d/b.tar",
        f"file://{tmp_path}/a.tar",
        "file:///elsewhere/c.tar",
    ]
    rows = [ShardInfo(uri=uri, size_bytes=9, version="v", num_samples=3) for uri in uris]
    path = tmp_path / "shards.json"
    write_sidecar(Manifest.build(rows, format="webdataset", origin_id="file://"), path, directory=f"file://{tmp_path}/")
    assert json.loads(path.read_text()) == {
        "wids_version": 1,
        "shardlist": [
            {"url": url, "nsamples": 3, "filesize": 9} for url in ("a.tar", "d/b.tar", "file:///elsewhere/c.tar")
        ],
    }
    assert [file.name for file in tmp_path.iterdir()] == ["shards.json"]


def test_what_cannot_be_written_whole_leaves_the_old_file_and_a_pipe_stays_a_pipe(tmp_path):
    shards = Manifest.build([], format="webdataset", origin_id="file://")
    path, link = tmp_path / "shards.json", tmp_path / "link"
    link.symlink_to(path)
    write_sidecar(shards, link, directory="")
    assert link.is_symlink()
    assert json.loads(path.read_text())["shardlist"] == []
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_sidecar(shards, tmp_path / "pipe", directory="")
    assert os.read(reader, 1000).startswith(b'{"wids_version"')
    os.close(reader)
    with pytest.raises(OSError, match="File name too long"):
        write_sidecar(shards, tmp_path / ("x" * 255), directory="")
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe", "shards.json"]


def test_a_count_that_proves_wrong_names_both_numbers_and_the_way_out():
    shard = manifest({"mem://bucket/a.tar": 5}).shard(0)
    check_count(shard, (5).to_bytes(8, "little") + b"rest")
    with pytest.raises(DatasetError, match=r"a.tar holds 6 samples, and 5 were written down .* `cacheloader index`"):
        check_count(shard, (6).to_bytes(8, "little"))
