"""Opening a data set on one connection: what travels, and how long it may take."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cacheloader import fdpass
from cacheloader.errors import ConfigError, DeadlineExceeded, ProtocolError, StateMismatch
from cacheloader.manifest.record import Manifest
from cacheloader.protocol import frames, messages
from cacheloader.transport.link import PeerGone

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.transport.link import Answer, Link

_STORE_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")
"""As ``DatasetSpec.environment`` has it; said here again because ``origin`` stays out of training processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The data set of a session.

    Attributes:
        spec: What to read.
        digest: Digest of its manifest, "" while unknown.
        manifest: Its manifest, ``None`` while unknown.
    """

    spec: messages.DatasetSpec
    digest: str
    manifest: Manifest | None = None

    @classmethod
    def named(cls, spec: messages.DatasetSpec, *, digest: str) -> Subject:
        """A data set as this process names it now; its working directory may be another one later.

        Raises:
            ConfigError: No URL is given.
        """
        if not spec.urls:
            raise ConfigError("urls is empty; name at least one URL, path, pattern or directory")
        urls = [absolute_url(url) for url in spec.urls]
        return cls(spec=msgspec.structs.replace(spec, urls=urls), digest=digest)

    def encoded_spec(self, *, private: bool) -> bytes:
        """The description as it is sent.

        Args:
            private: Whether it goes to a peer that works for this user alone. Credentials in this process's environment
                go nowhere else, and are read anew each time: they may have been renewed.

        Raises:
            ConfigError: A storage option is of a type that cannot travel.
        """
        environment = {name: value for name, value in os.environ.items() if name.startswith(_STORE_PREFIXES)}
        spec = msgspec.structs.replace(self.spec, environment=environment if private else {})
        try:
            return frames.encode(spec)
        except (TypeError, ValueError, OverflowError) as error:
            # Not the value: it may be a secret.
            culprit = next((name for name, value in self.spec.storage_options.items() if not _travels(value)), "")
            raise ConfigError(
                f"storage_options[{culprit!r}] cannot be sent to another process ({error}); "
                "pass text, numbers, booleans, lists and dicts only"
            ) from error


class Opening:
    """A data set that is being opened; it can be waited for in several steps.

    Args:
        link: The connection, on which ``OpenDataset`` is sent at once.
        subject: The data set.
        private: Whether the peer works for this user alone.
        deadline: For the sending, on the clock of ``time.monotonic``.
    """

    def __init__(self, link: Link, subject: Subject, *, private: bool, deadline: float) -> None:
        self._link = link
        self._subject = subject
        self._id = link.next_id()
        self._last_news = "it said nothing"
        fd = fdpass.sealed_memory_file("cacheloader-spec", subject.encoded_spec(private=private))
        try:
            link.send(messages.OpenDataset(id=self._id, digest=subject.digest), fd, deadline=deadline)
        finally:
            os.close(fd)

    @classmethod
    def begin(cls, link: Link, subject: Subject, *, private: bool, timeout_s: float) -> Opening:
        """As the constructor, for a peer that has just answered.

        Raises:
            PeerGone: It does not take the request.
        """
        try:
            return cls(link, subject, private=private, deadline=time.monotonic() + timeout_s)
        except TimeoutError as error:
            raise PeerGone(f"{link.peer} does not read its messages") from error

    def finish(self, *, deadline: float) -> Manifest:
        """The manifest, if it comes before the deadline.

        Raises:
            TimeoutError: It did not; this may be called again.
            PeerGone: The peer is gone.
            OriginError, DatasetError, ConfigError: As the peer found.
        """
        while True:
            answer = self._link.receive(self._id, deadline=deadline)
            if isinstance(answer.reply, messages.Progress):
                answer.close()
                self._note(answer.reply)
            else:
                return self._manifest(answer)

    def wait(self, *, silence_s: float, progress: Callable[[str, int, int], None] | None) -> Manifest:
        """The manifest, however long it takes, as long as the peer reports progress.

        Args:
            silence_s: Longest time without any news.
            progress: Called with (stage, done, total).

        Raises:
            DeadlineExceeded: The peer was silent for too long.
            PeerGone, OriginError, DatasetError, ConfigError: As in ``finish``.
        """
        while True:
            try:
                answer = self._link.receive(self._id, deadline=time.monotonic() + silence_s)
            except TimeoutError as error:
                raise DeadlineExceeded(
                    f"{self._subject.spec.urls[0]} was not resolved: {self._link.peer} has been silent for "
                    f"{silence_s:g} s ({self._last_news}); look at its log and at the store, or raise timeout_s="
                ) from error
            if not isinstance(answer.reply, messages.Progress):
                return self._manifest(answer)
            answer.close()
            self._note(answer.reply)
            if progress is not None:
                progress(answer.reply.stage, answer.reply.done, answer.reply.total)

    def _note(self, news: messages.Progress) -> None:
        self._last_news = f"last news: {news.stage}, {news.done} of {news.total or 'an unknown number'}"

    def _manifest(self, answer: Answer) -> Manifest:
        try:
            if not isinstance(answer.reply, messages.DatasetReady):
                raise ProtocolError(f"{self._link.peer} answered OpenDataset with {type(answer.reply).__name__}")
            manifest = Manifest.from_buffer(_mapped(answer.take_fd()))
        finally:
            answer.close()
        if manifest.digest != answer.reply.digest:
            raise ProtocolError(
                f"{self._link.peer} sent the manifest {manifest.digest} and called it {answer.reply.digest}"
            )
        if self._subject.digest not in ("", manifest.digest):
            raise StateMismatch(
                f"the data set {self._subject.spec.urls[0]} now has the manifest {manifest.digest}, and "
                f"{self._subject.digest} was expected: shards were added, removed or changed since"
            )
        return manifest


def _mapped(fd: int) -> mmap.mmap | bytes:
    size_bytes = os.fstat(fd).st_size
    return mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ) if size_bytes else b""


def absolute_url(url: str) -> str:
    """``url`` as another process, with another working directory, understands it.

    Raises:
        ConfigError: It is empty, as an unset variable is, and would stand for the working directory.
    """
    if not url:
        raise ConfigError('a URL is empty; name a URL, path, pattern or directory, "." for the working directory')
    if "://" in url:
        return url
    return os.path.join(os.getcwd(), os.path.expanduser(url))  # noqa: PTH109,PTH111,PTH118  (keeps a trailing slash)


def _travels(value: object) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
