"""A shared daemon lends its rights to nobody: what its clients may name, and what its configuration can allow."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from cacheloader_daemon.rights import ClientRights, realm

from cacheloader.errors import ConfigError, OriginDenied
from tests.support.node_daemon import NodeDaemon
from tests.support.tars import packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeDaemon]:
    """A shared daemon as it comes."""
    daemon = NodeDaemon(directory=tmp_path_factory.mktemp("shared") / "cache", private=False).start()
    yield daemon
    assert "defect" not in daemon.log
    assert daemon.stop() == 0


@pytest.mark.parametrize("protocol", ["simplecache", "filecache", "dir", "asynclocal", "reference", "zip", "memory"])
def test_a_client_cannot_reach_a_file_of_the_node_through_another_protocol(
    shared: NodeDaemon, tmp_path: Path, protocol: str
) -> None:
    (tmp_path / "secret.tar").write_bytes(b"only the daemon's user may read this")
    written = tmp_path / "written by the daemon"
    options: dict[str, object] = {"target_protocol": "file", "cache_storage": str(written), "path": "/"}
    with shared.connect() as client, pytest.raises(ConfigError, match="allowed_schemes"):
        client.open_dataset([f"{protocol}://{tmp_path}/secret.tar"], options=options)
    assert not written.exists()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/", {"client_kwargs": {"verify": "/etc/shadow"}}),
        ("s3://b/", {"engine": "fsspec", "client_kwargs": {"verify": "certificates.pem"}}),
        ("https://host/a.tar", {"ssl": "/etc/shadow"}),
        ("gs://b/", {"token": "/etc/shadow"}),
        ("gs://b/", {"token": "cache"}),
        ("gs://b/", {"token": {"type": "external_account", "credential_source": {"file": "/etc/shadow"}}}),
        ("hf://b/", {"cache": ["/etc"]}),
        ("hf://b/", {"nested": {"deeper": "~/.ssh/id"}}),
        ("hf://b/", {"fo": "File:///etc/shadow"}),
    ],
    ids=repr,
)
def test_an_option_that_may_name_a_path_is_refused_unless_the_daemon_reads_paths_for_its_clients(
    url: str, options: dict[str, Any]
) -> None:
    with pytest.raises(
        ConfigError, match=r"this daemon is shared and reads no local paths .* option .*allow_local_paths"
    ):
        ClientRights(schemes=frozenset({"hf"})).check(url, options)
    ClientRights(schemes=frozenset({"hf"}), local_paths=True).check(url, options)


def test_a_profile_of_the_daemon_is_not_a_clients_to_choose(shared: NodeDaemon) -> None:
    with shared.connect() as client, pytest.raises(ConfigError, match="allow_profiles"):
        client.open_dataset(["s3://b/"], options={"profile": "admin"})
    ClientRights(profiles=True).check("s3://b/", {"profile": "admin"})


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://b/", {"key": "k", "secret": "/s/", "token": "/looks/like/a/path", "client_kwargs": {"verify": False}}),
        ("s3://b/", {"engine": "fsspec", "anon": True}),
        ("https://host/a.tar", {"headers": {"Authorization": "Bearer x"}}),
        ("gs://b/", {"token": "anon"}),
        ("gs://b/", {"token": {"type": "service_account"}}),
        ("gs://b/", {"token": None}),
        ("az://c/", {"account_name": "a", "account_key": "/k="}),
    ],
    ids=repr,
)
def test_a_clients_own_credentials_are_its_own_to_pass(url: str, options: dict[str, Any]) -> None:
    ClientRights().check(url, options)


def test_a_name_that_no_table_has_is_refused_also_where_fsspec_would_take_it() -> None:
    with pytest.raises(ConfigError, match=r"unknown name 'client_kwargs\.trust_env'"):
        ClientRights().check("https://host/a.tar?x=1", {"client_kwargs": {"trust_env": True}})


def test_a_scheme_that_the_configuration_names_is_allowed(daemons: Callable[..., NodeDaemon]) -> None:
    daemon = daemons(private=False)
    config = daemon.directory.with_suffix(".toml")
    config.write_text('allowed_schemes = ["nosuchscheme"]\n')
    daemon.arguments = ["--config", str(config)]
    daemon.start()
    with daemon.connect() as client, pytest.raises(ConfigError, match="unknown protocol nosuchscheme"):
        client.open_dataset(["nosuchscheme://b/a.tar"])


class Guarded(BaseHTTPRequestHandler):
    """A web server with one shard, for those who have the token."""

    protocol_version = "HTTP/1.1"
    body = packed([(f"{number}.txt", b"private") for number in range(3)])

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        status, body = 200, self.body
        if self.headers.get("Authorization") != "Bearer alice":
            status, body = 403, b""
        elif not self.path.partition("?")[0].endswith("a.tar"):
            status, body = 404, b""
        elif wanted := self.headers.get("Range"):
            first, last = (int(text) for text in wanted.split("=")[1].split("-"))
            status, body = 206, body[first : last + 1]
        self.send_response(status)
        self.send_header("ETag", '"v1"')
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.body)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def test_to_know_the_digest_of_a_manifest_is_no_permission(shared: NodeDaemon) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Guarded)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/a.tar"

    def options(token: str) -> dict[str, object]:
        return {"headers": {"Authorization": f"Bearer {token}"}}

    try:
        with shared.connect() as client:
            digest = client.open_dataset([url], options=options("alice")).digest
            client.acquire(0).close()
        with shared.connect() as client, pytest.raises(OriginDenied):
            client.open_dataset([url], options=options("mallory"), digest=digest)
        # Who may read it needs no new listing, also with options that the daemon has not seen yet.
        with shared.connect() as client:
            assert client.open_dataset([url], options=options("alice") | {"ssl": False}, digest=digest).digest == digest
    finally:
        server.shutdown()
        server.server_close()


def test_what_is_secret_in_a_url_is_neither_in_the_status_nor_in_the_log(daemons: Callable[..., NodeDaemon]) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Guarded)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    daemon = daemons().start()
    url = f"http://127.0.0.1:{server.server_port}/a.tar?signature=hush"
    options: dict[str, object] = {"headers": {"Authorization": "Bearer alice"}}
    try:
        with daemon.connect() as client:
            client.open_dataset([url], options=options)
            assert "a.tar?***" in client.status().decode()
            assert "hush" not in client.status().decode()
        with daemon.connect() as client, pytest.raises(OriginDenied) as denied:
            client.open_dataset([url], options={"headers": {"Authorization": "Bearer mallory"}})
        assert "hush" not in denied.value.message + denied.value.uri + daemon.log
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("https://cdn.example/", {"headers": {"Host": "other.example"}}),
        ("https://cdn.example/", {"client_kwargs": {"headers": {"X-Original-URL": "/other"}}}),
        ("https://cdn.example/", {"ssl": False}),
        ("s3://b/", {"client_kwargs": {"verify": False}, "key": "k", "secret": "s"}),
        ("s3://b/", {"use_ssl": False, "key": "k", "secret": "s"}),
        ("hf://b/", {"endpoint": "https://other.example"}),
    ],
    ids=repr,
)
def test_what_a_store_may_have_answered_otherwise_for_one_client_is_not_kept_for_all(
    url: str, options: dict[str, Any]
) -> None:
    """Else one user could fill another's cache with bytes of his own making."""
    assert realm(url, options)
    assert realm(url, options) == realm(url, dict(options))
    assert "example" not in realm(url, options)


def test_credentials_alone_share_what_they_bring() -> None:
    assert realm("https://cdn.example/", {"headers": {"Authorization": "Bearer x"}, "ssl": True}) == ""
    assert realm("s3://b/", {"key": "k", "secret": "s", "endpoint_url": "http://minio"}) == ""


def test_the_daemons_own_credentials_go_to_an_endpoint_that_the_configuration_names() -> None:
    with pytest.raises(ConfigError, match="allowed_endpoints"):
        ClientRights().check("s3://b/", {"endpoint_url": "http://minio.example:9000/"})
    ClientRights(endpoints=frozenset({"http://minio.example:9000"})).check(
        "s3://b/", {"endpoint_url": "http://minio.example:9000/"}
    )
    ClientRights().check("s3://b/", {"endpoint_url": "http://minio.example:9000/", "anon": True})
    usual = "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=k;EndpointSuffix=core.windows.net"
    ClientRights().check("az://c/", {"connection_string": usual})
    with pytest.raises(ConfigError, match="allowed_endpoints"):
        ClientRights().check("az://c/", {"connection_string": f"{usual};BlobEndpoint=http://other.example"})
