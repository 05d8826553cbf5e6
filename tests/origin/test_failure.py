from __future__ import annotations

import inspect
import pickle
import time

import botocore.exceptions
import fsspec.exceptions
import obstore.exceptions
import pytest
from s3fs.errors import ERROR_CODE_TO_EXCEPTION

from cacheloader.errors import (
    CacheloaderError,
    CorruptShard,
    OriginChanged,
    OriginDenied,
    OriginError,
    OriginNotFound,
    OriginShortBody,
    OriginThrottled,
    OriginTimeout,
    OriginUnavailable,
    from_wire,
)
from cacheloader.origin import fsspec_errors, obstore_errors
from cacheloader.origin.failure import failure, kind_for_status, masked, secret_values
from cacheloader.origin.options import PUBLIC_NAMES


def classes_in(module) -> set[type[BaseException]]:
    return {
        value for _, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, BaseException) and value.__module__ == module.__name__
    }  # fmt: skip


def test_every_exception_of_obstore_has_a_meaning_and_none_that_it_no_longer_has():
    assert classes_in(obstore.exceptions) == set(obstore_errors.KINDS)


def test_every_exception_of_fsspec_has_a_meaning():
    meanings = {error: fsspec_errors.described(error("message"))[0] for error in classes_in(fsspec.exceptions)}
    assert meanings == {
        fsspec.exceptions.BlocksizeMismatchError: OriginShortBody,
        fsspec.exceptions.FSTimeoutError: OriginTimeout,
    }


def test_every_connection_error_of_botocore_has_a_meaning():
    roots = (botocore.exceptions.HTTPClientError, botocore.exceptions.ConnectionError)
    kinds = {error.__name__ for error in classes_in(botocore.exceptions) if issubclass(error, roots)}
    assert kinds - {"ProxyConnectionError"} <= set(fsspec_errors.KINDS)
    assert {name for name in kinds if "Timeout" in name} == {"ConnectTimeoutError", "ReadTimeoutError"}


def test_every_error_code_that_s3fs_knows_as_denied_or_missing_means_the_same_here():
    for code, known in ERROR_CODE_TO_EXCEPTION.items():
        kind = kind_for_status(int(code), "") if code.isdigit() else kind_for_status(_usual_status(known), code)
        if known is FileNotFoundError:
            assert kind is OriginNotFound, code
        elif known is PermissionError:
            assert kind is OriginDenied, code


def _usual_status(known: object) -> int:
    return {FileNotFoundError: 404, PermissionError: 403}.get(known, 400)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "", OriginDenied),
        (403, "", OriginDenied),
        (403, "SlowDown", OriginThrottled),
        (400, "ExpiredToken", OriginDenied),
        (400, "RequestTimeout", OriginTimeout),
        (404, "NoSuchKey", OriginNotFound),
        (412, "", OriginChanged),
        (416, "InvalidRange", OriginShortBody),
        (429, "", OriginThrottled),
        (503, "", OriginThrottled),
        (503, "SlowDown", OriginThrottled),
        (500, "", OriginUnavailable),
        (502, "", OriginUnavailable),
        (504, "", OriginTimeout),
        (400, "", OriginError),
        (301, "", OriginError),
    ],
)
def test_a_status_has_one_meaning_and_the_stores_code_refines_it(status: int, code: str, kind: type[OriginError]):
    assert kind_for_status(status, code) is kind


def test_a_message_is_one_sentence_that_says_what_where_why_and_the_way_out():
    error = failure(OriginNotFound, action="describing", uri="s3://b/k", cause="404 NoSuchKey (There is none.)")
    assert str(error) == (
        "describing s3://b/k failed: 404 NoSuchKey (There is none.); "
        "check the spelling, the bucket and the endpoint_url"
    )
    assert error.uri == "s3://b/k"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://h/k?X-Amz-Signature=abc&b=1 in 2 ms", "GET https://h/k?*** in 2 ms"),
        ('uri: "https://h/k?sig=abc", next', 'uri: "https://h/k?***", next'),
        ("https://user:word@h/k", "https://***@h/k"),
        ("https://h/k?sig=abc, one of 1: 404", "https://h/k?***, one of 1: 404"),
        ("https://user:w@rd@h/k and mail to a@b", "https://***@h/k and mail to a@b"),
        ("s3://bucket/what?.tar is missing", "s3://bucket/what?.tar is missing"),
        ("really? yes=no", "really? yes=no"),
    ],
)
def test_signatures_and_users_in_urls_are_masked_and_question_marks_in_keys_are_not(text: str, shown: str):
    assert masked(text) == shown


@pytest.mark.parametrize("kind", [CacheloaderError, CorruptShard, OriginDenied])
def test_no_error_of_any_kind_shows_the_signature_or_the_user_of_a_url(kind: type[CacheloaderError]):
    uri = "https://user:hunter2@host/a.tar?X-Amz-Signature=deadbeef&x=1"
    error = kind(f"shard {uri} is cut; see it", uri=uri)
    assert str(error) == "shard https://***@host/a.tar?*** is cut; see it"
    assert error.uri == "https://***@host/a.tar?***"
    for copy in (pickle.loads(pickle.dumps(error)), from_wire(kind.__name__, error.message, error.uri)):
        assert (type(copy), copy.message, copy.uri) == (kind, error.message, error.uri)
    assert "hunter2" not in from_wire("OriginDenied", uri, uri).message, "a peer may be older"


def test_a_message_of_many_urls_is_masked_in_no_time():
    begun_s = time.thread_time()  # a pause of the machine costs nothing
    for text in ("s://" * 100_000, "?" * 400_000, "a://" + "x@" * 200_000, "?=" * 200_000):
        CacheloaderError(text, uri=text)
    assert time.thread_time() - begun_s < 5


def test_every_value_that_may_be_a_secret_is_masked():
    options = {
        "key": "AKIAPUBLIC",
        "secret": "very-secret",
        "endpoint_url": "http://host",
        "client_kwargs": {"region_name": "us-east-1", "headers": {"Authorization": "Bearer abcdef"}},
        "token": {"private_key": "-----BEGIN", "type": "x"},
    }
    secrets = secret_values(options, public=PUBLIC_NAMES)
    assert secrets == ["Bearer abcdef", "very-secret", "-----BEGIN"]
    assert masked("AKIAPUBLIC very-secret Bearer abcdef", secrets) == "AKIAPUBLIC *** ***"
