"""A web server whose files are private: who may list (HEAD) and who may read (GET) each is told apart by a token."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass
class PrivateWeb:
    """Serves ``files`` by path. A file that ``readers`` does not name is everybody's.

    Attributes:
        files: Path to content.
        readers: Path to the tokens that may read it.
        asked: (method, path, token) of every request.
    """

    files: dict[str, bytes]
    readers: dict[str, set[str]] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes, dict[str, str]]:
        path = path.partition("?")[0]
        token = headers.get("authorization", "").removeprefix("Bearer ")
        self.asked.append((method, path, token))
        if path not in self.files:
            return 404, b"", {}
        readers = self.readers.get(path)
        if method == "GET" and readers is not None and token not in readers:
            return 403, b"", {}
        body = self.files[path]
        extra = {"ETag": f'"{len(body)}-{hash(body):x}"'}
        wanted = headers.get("range")
        if wanted is None:
            return 200, body, extra
        first, last = (int(text) for text in wanted.split("=")[1].split("-"))
        return 206, body[first : last + 1], {**extra, "Content-Range": f"bytes {first}-{last}/{len(body)}"}


def _handler(web: PrivateWeb) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            status, body, extra = web.answer(
                self.command, self.path, {name.lower(): value for name, value in self.headers.items()}
            )
            self.send_response(status)
            for name, value in extra.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler
