"""What a helper process says to a client that waits."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from typing import TYPE_CHECKING

from cacheloader import fdpass
from cacheloader.protocol import frames, messages
from cacheloader.transport import direct_conversation
from cacheloader.transport.direct_conversation import Conversation
from cacheloader.transport.direct_datasets import DirectDatasets
from cacheloader.transport.direct_manifests import ManifestFolder
from tests.support.shard_sets import write_shards

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


async def test_a_helper_that_loads_its_engines_gives_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = threading.Event()
    monkeypatch.setattr(direct_conversation, "import_module", lambda _: loaded.wait(60))
    monkeypatch.setattr(messages, "HEARTBEAT_S", 0.01)
    shards = write_shards(tmp_path / "data", num_shards=2, samples_per_shard=3)
    datasets = DirectDatasets(ManifestFolder(tmp_path / "manifests"), memory_bytes=2**20)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60)
    conversation = asyncio.create_task(Conversation(theirs, datasets=lambda: datasets, memory_bytes=2**20).run())
    spec = fdpass.sealed_memory_file("spec", frames.encode(messages.DatasetSpec(urls=[f"{shards.folder}/"])))
    fdpass.send(ours, frames.encode(messages.OpenDataset(id=1, digest="")), spec)
    os.close(spec)
    for _ in range(3):
        assert isinstance(await heard(ours), messages.Progress)
    loaded.set()
    while isinstance(reply := await heard(ours), messages.Progress):
        continue
    assert isinstance(reply, messages.DatasetReady)
    ours.close()
    await conversation


async def heard(sock: socket.socket) -> messages.Reply:
    received = await asyncio.to_thread(fdpass.receive, sock)
    if received.fd is not None:
        os.close(received.fd)
    return frames.decode_reply(received.data)
