"""Messages to bytes and back; bad bytes become a ``ProtocolError`` and never an object."""

from __future__ import annotations

import msgspec

from cacheloader.errors import CacheloaderError, ProtocolError
from cacheloader.protocol import messages

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(messages.Request)
_replies = msgspec.msgpack.Decoder(messages.Reply)
_specs = msgspec.msgpack.Decoder(messages.DatasetSpec)

MAX_SPEC_BYTES = 64 * 2**20
"""A data set named by a list of a million URLs fits; what is larger is an attack or a mistake."""


MAX_FAILURE_CHARACTERS = 8000
"""Keeps a failure (at most 4 bytes a character, and its URI as much again) below the limit of one message."""


def failed(request_id: int, error: CacheloaderError) -> messages.Failed:
    """``error`` as an answer to ``request_id`` (0: the connection itself is at fault)."""
    return messages.Failed(
        id=request_id,
        kind=type(error).__name__,
        message=sendable(error.message, MAX_FAILURE_CHARACTERS),
        uri=sendable(error.uri, MAX_FAILURE_CHARACTERS // 4),
    )


def sendable(text: str, max_characters: int) -> str:
    """``text``, cut to a length, with what UTF-8 cannot hold spelled out.

    A file's name that is no UTF-8 arrives as lone surrogates, and an error that names it still has to arrive.
    """
    return text[:max_characters].encode("utf-8", "backslashreplace").decode("utf-8")[:max_characters]


def encode(message: messages.Request | messages.Reply | messages.DatasetSpec) -> bytes:
    """The bytes of one message."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> messages.Request:
    """A message from a client.

    Raises:
        ProtocolError: The bytes are no request of this protocol; the text names the field.
    """
    try:
        return _requests.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes from a client are no request: {error}") from error


def decode_reply(data: bytes) -> messages.Reply:
    """A message from a daemon.

    Raises:
        ProtocolError: The bytes are no reply of this protocol; the text names the field.
    """
    try:
        return _replies.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes from the daemon are no reply: {error}") from error


def decode_spec(data: bytes) -> messages.DatasetSpec:
    """A data set's description, as it travels beside ``OpenDataset``.

    Raises:
        ProtocolError: The bytes are no description.
    """
    try:
        return _specs.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{len(data)} bytes describe no data set: {error}") from error


def agree(hello: messages.Hello) -> int:
    """The protocol version for a connection: the newest that both sides speak.

    Raises:
        ProtocolError: There is none.
    """
    newest = min(hello.newest, messages.VERSION)
    if newest < max(hello.oldest, messages.OLDEST_VERSION):
        raise ProtocolError(
            f"the client speaks protocol versions {hello.oldest} to {hello.newest}, this daemon "
            f"{messages.OLDEST_VERSION} to {messages.VERSION}; upgrade the older side"
        )
    return newest
