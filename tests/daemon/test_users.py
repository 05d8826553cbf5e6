"""A shared daemon and two real users of this machine: each reaches what is his, and nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cacheloader.errors import ConfigError, DaemonUnavailable, OriginDenied
from tests.support.descriptors import links_of
from tests.support.node_daemon import NodeDaemon, held_still
from tests.support.private_web import PrivateWeb
from tests.support.tars import packed
from tests.support.user_process import UserProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become other users")

DAEMON_UID, ALICE_UID, BOB_UID, EVE_UID = 65500, 65501, 65502, 65503
VISION_GID = 65510

PRIVATE = packed([(f"{number}.txt", b"alice's own %d" % number) for number in range(3)])
PUBLIC = packed([(f"{number}.txt", b"everybody's %d" % number) for number in range(3)])


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Node:
    """A shared daemon that runs as a user of its own, its users, and a web server that tells them apart."""

    folder: Path
    web: PrivateWeb
    daemon: NodeDaemon = field(init=False)
    alice: UserProcess = field(init=False)
    bob: UserProcess = field(init=False)
    eve: UserProcess = field(init=False)

    @property
    def socket(self) -> Path:
        return self.folder / "run" / "daemon.sock"

    @property
    def volume(self) -> Path:
        return self.folder / "volume"

    @property
    def config(self) -> str:
        return f"""
            socket = "{self.socket}"
            socket_mode = 0o666
            max_requests = 8

            [[tenants]]
            name = "alice"
            users = [{ALICE_UID}]
            allow = ["{self.web.url}/", "file://{self.volume}/alice/"]

            [[tenants]]
            name = "vision"
            groups = [{VISION_GID}]
            allow = ["{self.web.url}/", "file://{self.volume}/"]
            deny = ["{self.web.url}/forbidden/", "file://{self.volume}/alice/"]
            """


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    folder = Path(tempfile.mkdtemp(prefix="cacheloader-users-"))
    folder.chmod(0o755)
    files = {"/a.tar": PRIVATE, "/b.tar": PUBLIC, "/forbidden/c.tar": PUBLIC}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        web = stack.enter_context(PrivateWeb(files=files, readers={"/a.tar": {"alice"}}))
        node = Node(folder=folder, web=web)
        for name in ("cache", "run"):
            (folder / name).mkdir()
            os.chown(folder / name, DAEMON_UID, DAEMON_UID)
        for name, content in (("alice", PRIVATE), ("bob", PUBLIC), ("outside", PRIVATE)):
            place = node.volume / name if name != "outside" else folder / name
            place.mkdir(parents=True)
            (place / "x.tar").write_bytes(content)
        os.chown(node.volume / "bob", BOB_UID, BOB_UID)
        (folder / "cacheloaderd.toml").write_text(node.config)
        # It may read every file of the machine, so that what its users cannot reach is kept from them by its rules.
        reads_all = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        launcher = ["setpriv", f"--reuid={DAEMON_UID}", f"--regid={DAEMON_UID}", "--clear-groups", *reads_all]
        arguments = ["--config", str(folder / "cacheloaderd.toml")]
        node.daemon = NodeDaemon(
            directory=folder / "cache", private=False, arguments=arguments, launcher=launcher, environment={"HOME": "/"}
        )
        node.daemon.start()
        stack.callback(node.daemon.kill)
        node.alice = stack.enter_context(UserProcess(ALICE_UID))
        node.bob = stack.enter_context(UserProcess(BOB_UID, groups=(BOB_UID, VISION_GID)))
        node.eve = stack.enter_context(UserProcess(EVE_UID))
        yield node
        assert "Traceback" not in node.daemon.log
        assert node.daemon.stop() == 0


def bearer(token: str) -> dict[str, object]:
    return {"Authorization": f"Bearer {token}"}


def test_a_user_whom_nobody_named_may_not_connect(node: Node) -> None:
    with pytest.raises(DaemonUnavailable, match=f"user {EVE_UID} may not use this daemon; its configuration lists"):
        node.eve.open(node.socket, [f"{node.web.url}/b.tar"])


def test_a_user_is_admitted_by_a_group_that_is_not_his_main_one(node: Node) -> None:
    assert node.bob.open(node.socket, [f"{node.web.url}/b.tar"])["uris"] == [f"{node.web.url}/b.tar"]
    assert node.bob.read(0)["bytes"] == sha(PUBLIC)


def test_a_shard_that_one_user_brought_is_not_read_by_another_without_his_own_right(node: Node) -> None:
    url = f"{node.web.url}/a.tar"
    digest = node.alice.open(node.socket, [url], headers=bearer("alice"))["digest"]
    assert node.alice.read(0)["bytes"] == sha(PRIVATE)
    for token in ("bob", "guessed"):
        # HEAD is answered to everybody, as a bucket may be listed by those who may not read.
        for known in ("", digest):
            node.bob.open(node.socket, [url], digest=known, headers=bearer(token))
            with pytest.raises(OriginDenied):
                node.bob.read(0)
    # The right is what counts, not the user: with a token that reads it he gets it, from the cache.
    asked = len(node.web.asked)
    node.bob.open(node.socket, [url], headers=bearer("alice"))
    assert node.bob.read(0) | {"names": []} == {"bytes": sha(PRIVATE), "source": "nvme", "writable": [], "names": []}
    assert ("GET", "/a.tar", "alice") in node.web.asked[asked:], "his right was asked for"
    assert node.alice.read(0)["source"] == "nvme", "and hers is known"


def test_a_url_that_is_denied_to_a_tenant_names_user_url_rule_and_way_out(node: Node) -> None:
    for spelling in ("/forbidden/c.tar", "/%66orbidden/c.tar", "/%2566orbidden/c.tar"):
        with pytest.raises(OriginDenied) as refused:
            node.bob.open(node.socket, [f"{node.web.url}{spelling}"])
        message = refused.value.message
        assert message.startswith(f"user {BOB_UID} may not read {node.web.url}{spelling}: the tenant 'vision'")
        assert f"but not {node.web.url}/forbidden/" in message
        assert "allow of that tenant" in message
    for spelling in ("/x/../forbidden/c.tar", "/x/%2e%2e/forbidden/c.tar", "//forbidden/c.tar", "/x%5cc.tar"):
        with pytest.raises(
            (OriginDenied, ConfigError), match=f"user {BOB_UID} may not read it: .* more than one place"
        ):
            node.bob.open(node.socket, [f"{node.web.url}{spelling}"])
    with pytest.raises((OriginDenied, ConfigError), match=f"user {BOB_UID} may not read http://localhost"):
        node.bob.open(node.socket, [f"http://localhost:{node.web.url.rpartition(':')[2]}/b.tar"])


def test_a_folder_is_read_by_those_whose_tenant_names_it_and_links_lead_nowhere_else(node: Node) -> None:
    assert node.alice.open(node.socket, [f"{node.volume}/alice/x.tar"])
    assert node.alice.read(0)["bytes"] == sha(PRIVATE)
    assert node.bob.open(node.socket, [f"{node.volume}/bob/"])["uris"] == [f"file://{node.volume}/bob/x.tar"]
    assert node.bob.read(0)["bytes"] == sha(PUBLIC)
    for url in (
        f"{node.volume}/alice/x.tar",
        f"{node.volume}/alice/",
        "/etc/passwd.tar",
        f"{node.folder}/outside/x.tar",
    ):
        with pytest.raises(OriginDenied, match=f"user {BOB_UID} may not read"):
            node.bob.open(node.socket, [url])
    links = {"file.tar": node.folder / "outside" / "x.tar", "folder": node.folder / "outside", "up": Path("../..")}
    for name, target in links.items():
        (node.volume / "bob" / name).symlink_to(target)
    os.mkfifo(node.volume / "bob" / "pipe.tar")
    try:
        for url in ("file.tar", "folder/x.tar", "folder/", "up/outside/x.tar"):
            with pytest.raises(OriginDenied, match="a link leads out of the folders that may be read"):
                node.bob.open(node.socket, [f"{node.volume}/bob/{url}"])
        # A listing leaves out what would lead elsewhere.
        assert node.bob.open(node.socket, [f"{node.volume}/bob/"])["uris"] == [f"file://{node.volume}/bob/x.tar"]
    finally:
        for name in (*links, "pipe.tar"):
            (node.volume / "bob" / name).unlink()


def test_a_link_that_is_changed_after_the_opening_is_not_followed_when_the_shard_is_read(node: Node) -> None:
    path = node.volume / "bob" / "swapped.tar"
    shutil.copy(node.volume / "bob" / "x.tar", path)
    target = node.folder / "outside" / "swapped.tar"
    target.write_bytes(PUBLIC)  # as long as the other, and as old, so that its version is the same
    status = path.stat()
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    try:
        # Counted by a file beside it, so that it is not read before.
        (node.volume / "bob" / "shards.json").write_text('{"swapped.tar": 3}')
        node.bob.open(node.socket, [f"file://{path}"])
        path.unlink()
        path.symlink_to(target)
        with pytest.raises(OriginDenied, match="a link leads out"):
            node.bob.read(0)
    finally:
        path.unlink()
        (node.volume / "bob" / "shards.json").unlink()


def test_what_a_lease_hands_out_can_be_read_and_nothing_else(node: Node) -> None:
    node.alice.open(node.socket, [f"{node.web.url}/b.tar"])
    lease = node.alice.read(0)
    assert lease["bytes"] == sha(PUBLIC)
    assert lease["writable"] == []
    assert node.alice.try_files(node.folder / "cache") == []


def test_the_cache_is_closed_to_all_but_its_daemon(node: Node) -> None:
    cache = node.folder / "cache"
    assert cache.stat().st_mode & 0o7777 == 0o700
    with held_still(node.daemon.pid):
        for path in cache.rglob("*"):
            status = path.lstat()
            assert status.st_uid == DAEMON_UID, path
            assert not status.st_mode & 0o007, f"{path} is open to others: {status.st_mode:o}"
            if path.suffix == ".data":
                assert status.st_mode & 0o777 == 0o440


def test_credentials_are_in_no_log_status_lease_name_command_line_or_file(node: Node) -> None:
    secret = "hush-hush-0815"
    node.web.readers["/a.tar"].add(secret)
    url = f"{node.web.url}/a.tar?signature={secret}"
    opened = node.alice.open(node.socket, [url], headers=bearer(secret))
    assert opened["uris"] == [url], "the client itself gets its URL back"
    lease = node.alice.read(0)
    # What it holds is known, so that listing it, which everybody may, is all that opening it takes.
    node.alice.open(node.socket, [f"{node.web.url}/a.tar"], headers=bearer(secret))
    node.alice.open(node.socket, [f"{node.web.url}/a.tar"], headers=bearer(f"{secret}-and-wrong"))
    with pytest.raises(OriginDenied):
        node.alice.read(0)
    node.alice.open(node.socket, [url], headers=bearer(secret))
    assert secret not in node.daemon.log
    assert secret not in str(lease["names"])
    assert secret not in str(node.alice.status())
    assert secret not in str(node.bob.status(node.socket))
    for pid in (node.daemon.pid, *node.daemon.children):
        for name in ("cmdline", "environ"):
            assert secret.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()
        assert not any(secret in link for link in links_of(pid))
    # A signed URL names its shards, so their manifest is not kept on disk.
    with held_still(node.daemon.pid):
        for path in (node.folder / "cache").rglob("*"):
            assert secret not in path.name
            if path.is_file():
                assert secret.encode() not in path.read_bytes(), path


def test_what_others_read_is_not_told_to_a_user(node: Node) -> None:
    url = f"{node.web.url}/a.tar"
    node.alice.open(node.socket, [url], headers=bearer("alice"))
    node.bob.open(node.socket, [f"{node.web.url}/b.tar"])
    seen = {session["uid"]: session["uri"] for session in node.bob.status()["sessions"]}
    assert seen == {ALICE_UID: "", BOB_UID: f"{node.web.url}/b.tar"}
    with UserProcess(DAEMON_UID) as administrator:
        everything = administrator.status(node.socket)["sessions"]
    assert url in [session["uri"] for session in everything], "an administrator sees all"


def test_an_endpoint_of_a_client_never_gets_the_daemons_own_credentials(node: Node) -> None:
    for url, options in (
        ("s3://bucket/a.tar", {"endpoint_url": node.web.url}),
        ("gs://bucket/a.tar", {"endpoint_url": node.web.url}),
        ("gs://bucket/a.tar", {"endpoint_url": node.web.url, "token": {"type": "service_account"}}),
        ("az://bucket/a.tar", {"account_host": "127.0.0.1", "account_name": "x"}),
        ("s3://bucket/a.tar", {"client_kwargs": {"verify": False}}),
        ("s3://bucket/a.tar", {"use_ssl": False}),
        ("s3://bucket/a.tar", {"requester_pays": True}),
    ):
        asked = len(node.web.asked)
        with pytest.raises(ConfigError, match=r"sends its own credentials nowhere else .*allowed_endpoints"):
            node.alice.open(node.socket, [url], **options)
        assert len(node.web.asked) == asked


def test_an_endpoint_outside_of_a_tenants_prefixes_is_refused_also_with_own_credentials(node: Node) -> None:
    with pytest.raises(ConfigError, match=r"tenant 'vision' read .* which does not cover the endpoint http://169\.254"):
        node.bob.open(
            node.socket, ["s3://latest/meta-data"], endpoint_url="http://169.254.169.254", key="k", secret="s"
        )


def test_what_a_tenant_is_guaranteed_stays_cached_while_another_fills_all_the_rest(node: Node, tmp_path: Path) -> None:
    sizes = {"alice": 4, "bob": 24}
    places = {name: node.volume / name / "many" for name in sizes}
    for name, count in sizes.items():
        places[name].mkdir()
        for number in range(count):
            content = packed([("0.bin", os.urandom(2**20 - 4096))])
            (places[name] / f"{number:03d}.tar").write_bytes(content)
    socket = node.folder / "run" / "second.sock"
    config = node.config.replace(str(node.socket), str(socket)).replace('name = "alice"', GUARANTEE)
    (node.folder / "second.toml").write_text(config)
    cache = node.folder / "second"
    cache.mkdir()
    os.chown(cache, DAEMON_UID, DAEMON_UID)
    daemon = NodeDaemon(
        directory=cache,
        cache_size="16MiB",
        private=False,
        arguments=["--config", str(node.folder / "second.toml")],
        launcher=node.daemon.launcher,
        environment={"HOME": "/"},
    ).start()
    try:
        node.alice.open(socket, [f"{places['alice']}/"])
        for shard in range(sizes["alice"]):
            node.alice.read(shard)
        node.bob.open(socket, [f"{places['bob']}/"])
        for _ in range(2):
            for shard in range(sizes["bob"]):
                node.bob.read(shard)
        status = node.alice.status()
        assert status["plan"]["evictions"] > 0, "he needed more than there was"
        assert status["plan"]["owner_bytes"]["alice"] >= sizes["alice"] * (2**20 - 4096)
        for shard in range(sizes["alice"]):
            assert node.alice.read(shard)["source"] == "nvme"
        assert daemon.stop() == 0
    finally:
        daemon.kill()
        for place in places.values():
            shutil.rmtree(place)


GUARANTEE = 'name = "alice"\nguaranteed_size = "6MiB"'


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs a mount namespace, to give the daemon a database of users of its own",
)
@pytest.mark.parametrize("look_up", [True, False])
def test_groups_that_the_systems_database_names_for_a_user_count_if_they_are_looked_up(
    node: Node, look_up: bool
) -> None:
    """Alice's process has her main group alone; the database of the daemon's node has her in the group vision."""
    folder = node.folder / f"database-{look_up}"
    (folder / "cache").mkdir(parents=True)
    os.chown(folder / "cache", DAEMON_UID, DAEMON_UID)
    (folder / "passwd").write_text(f"root:x:0:0::/:\nalice:x:{ALICE_UID}:{ALICE_UID}::/:\n")
    (folder / "group").write_text(f"root:x:0:\nvision:x:{VISION_GID}:bob,alice\n")
    socket = node.folder / "run" / f"database-{look_up}.sock"
    (folder / "cacheloaderd.toml").write_text(f"""
        socket = "{socket}"
        socket_mode = 0o666
        look_up_groups = {str(look_up).lower()}
        [[tenants]]
        name = "vision"
        groups = [{VISION_GID}]
        allow = ["{node.web.url}/"]
        """)
    mounts = " && ".join(f"mount --bind {folder}/{name} /etc/{name}" for name in ("passwd", "group"))
    own_database = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    daemon = NodeDaemon(
        directory=folder / "cache",
        private=False,
        arguments=["--config", str(folder / "cacheloaderd.toml")],
        launcher=[*own_database, *node.daemon.launcher],
        environment={"HOME": "/"},
    )
    try:
        daemon.start()
        if look_up:
            node.alice.open(socket, [f"{node.web.url}/b.tar"])
            assert node.alice.read(0)["bytes"] == sha(PUBLIC)
        else:
            with pytest.raises(DaemonUnavailable, match=f"user {ALICE_UID} may not use this daemon"):
                node.alice.open(socket, [f"{node.web.url}/b.tar"])
        with pytest.raises(DaemonUnavailable, match=f"user {EVE_UID} may not use this daemon"):
            node.eve.open(socket, [f"{node.web.url}/b.tar"])
        assert node.bob.open(socket, [f"{node.web.url}/b.tar"]), "the groups of his process count in any case"
        assert daemon.stop() == 0
    finally:
        daemon.kill()
