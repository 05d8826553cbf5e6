"""AWS credentials, region and endpoint as the usual chain finds them for one job's environment."""

from __future__ import annotations

import json
import logging
import subprocess
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from aiofiles.os import wrap

from cacheloader import interpreter
from cacheloader.errors import OriginDenied, OriginError
from cacheloader.origin.failure import failure
from cacheloader.origin.threads import DaemonThreads

if TYPE_CHECKING:
    from collections.abc import Mapping

DEADLINE_S = 7.0
"""A chain without an answer by then has none: a missing credential is reported within 10 s, retries included."""

_log = logging.getLogger(__name__)

_CHAIN = "cacheloader.origin.aws_chain"
_RENEW_BEFORE = timedelta(minutes=5)
_REST_S = 30.0
_LEAST_REST_S = 5.0
_WAY_OUT = (
    "give key and secret in storage_options, set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE,"
    " or pass anon=True for public data"
)
# One at a time is enough: a question is asked once per bucket and hour.
_THREADS = DaemonThreads(2, name="aws-chain")


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsKey:
    """One set of credentials.

    Attributes:
        key: Access key id.
        secret: Secret access key.
        token: Session token, "" for long-lived keys.
        expires: When they end, ``None`` for long-lived keys.
    """

    key: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)
    expires: datetime | None = None

    def fresh(self) -> bool:
        """Whether they will still hold for some minutes."""
        return self.expires is None or datetime.now(UTC) < self.expires - _RENEW_BEFORE


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsAnswer:
    """What the chain and the configuration files say.

    Attributes:
        key: Credentials, ``None`` if there are none or none were asked for.
        region: Region of the profile, "" if none.
        endpoint_url: Endpoint of the profile for S3, "" if none.
    """

    key: AwsKey | None
    region: str
    endpoint_url: str


class AwsChain:
    """Asks the chain for one environment and profile, and remembers the answer until shortly before it expires.

    Used from several loops and threads: fsspec has a loop of its own.
    """

    def __init__(self, environment: Mapping[str, str], *, profile: str, uri: str) -> None:
        self._environment = {**environment, "PYTHONPATH": interpreter.search_path(_CHAIN)}
        self._profile = profile
        self._uri = uri
        self._answer: AwsAnswer | None = None
        self._failure: tuple[float, OriginError] | None = None
        self._renewable_s = 0.0
        self._asking = threading.Lock()

    async def ask(self, *, credentials: bool = True) -> AwsAnswer:
        """The answer; without credentials it may leave them out.

        Raises:
            OriginDenied: The chain failed, or did not answer in time.
        """
        answer = self._remembered(credentials=credentials)
        if answer is None:
            answer = await wrap(self._ask_once)(credentials, executor=_THREADS)
            assert isinstance(answer, AwsAnswer)
        return answer

    async def key(self) -> AwsKey:
        """Credentials that hold for some minutes.

        Raises:
            OriginDenied: There are none, the chain failed, or it did not answer in time.
        """
        answer = await self.ask()
        if answer.key is None:
            raise self._denied("there are no AWS credentials in the environment, in a profile, or from the instance")
        return answer.key

    async def renew(self) -> bool:
        """Ask again although the last answer should still hold, since a store refuses it.

        Returns:
            Whether there are other credentials now. The chain is not asked for every request that is refused: not for
            some seconds after it gave others, nor for half a minute after it gave the same.
        """
        renewed = await wrap(self._renew)(executor=_THREADS)
        return bool(renewed)

    def _renew(self) -> bool:
        with self._asking:
            if time.monotonic() < self._renewable_s:
                return False
            before = None if self._answer is None else self._answer.key
            try:
                answer = self._ask(credentials=True)
            except OriginError as error:
                # The store's refusal says more than that the chain fails now.
                _log.warning("credentials that a store refuses cannot be renewed: %s", error.message)
                answer = None
            is_other = answer is not None and answer.key is not None and answer.key != before
            if is_other:
                self._answer = answer
            self._renewable_s = time.monotonic() + (_LEAST_REST_S if is_other else _REST_S)
            return is_other

    def _remembered(self, *, credentials: bool) -> AwsAnswer | None:
        answer = self._answer
        fresh = answer is not None and (not credentials or (answer.key is not None and answer.key.fresh()))
        return answer if fresh else None

    def _ask_once(self, credentials: bool) -> AwsAnswer:  # noqa: FBT001
        begun_s = time.monotonic()
        with self._asking:  # held for the deadline of a question at most
            answer = self._remembered(credentials=credentials)
            if answer is None and self._failure is not None and self._failure[0] > begun_s:
                raise self._failure[1]  # the question we waited for was ours too
            if answer is None:
                try:
                    answer = self._answer = self._ask(credentials=credentials)
                except OriginError as error:
                    self._failure = (time.monotonic(), error)
                    raise
            return answer

    def _ask(self, *, credentials: bool) -> AwsAnswer:
        question = json.dumps({"profile": self._profile, "credentials": credentials})
        try:
            done = subprocess.run(  # noqa: S603
                interpreter.command(_CHAIN),
                input=question,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                env=self._environment,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            # Denied, not a timeout: asking again would hang again, and the way out is to give credentials.
            raise self._denied(f"the AWS credential chain gave no answer in {DEADLINE_S:g} s") from error
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise self._denied(f"the AWS credential chain failed ({last})")
        answer = json.loads(done.stdout)
        if "error" in answer:
            raise self._denied(answer["error"])
        key = None
        if answer.get("key"):
            expires = answer["expires"] and datetime.fromisoformat(answer["expires"])
            key = AwsKey(
                key=answer["key"], secret=answer["secret"], token=answer["token"] or "", expires=expires or None
            )
        return AwsAnswer(key=key, region=answer["region"] or "", endpoint_url=answer["endpoint_url"] or "")

    def _denied(self, cause: str) -> OriginError:
        return failure(OriginDenied, action="finding credentials for", uri=self._uri, cause=cause, way_out=_WAY_OUT)
