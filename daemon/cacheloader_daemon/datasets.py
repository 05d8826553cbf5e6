"""Data sets by what clients call them: resolved once at a time, kept for a moment, and shared by all who read them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import mmap
import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from cacheloader import fdpass
from cacheloader.errors import CacheloaderError, DaemonError, DaemonUnavailable, StateMismatch
from cacheloader.manifest.record import Manifest
from cacheloader.protocol import frames
from cacheloader.protocol.messages import HEARTBEAT_S
from cacheloader_daemon.guarded import GuardedOrigin
from cacheloader_daemon.rights import realm
from cacheloader_daemon.shards import Dataset
from cacheloader_daemon.store import DiskTrouble

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from cacheloader.origin.base import Origin
    from cacheloader.protocol.messages import DatasetSpec
    from cacheloader_daemon.disk import DiskThreads
    from cacheloader_daemon.rights import ClientRights
    from cacheloader_daemon.runtime import Runtime
    from cacheloader_daemon.store import Pool
    from cacheloader_daemon.tenants import Visitor

    Tell = Callable[[str, int, int], None]

log = logging.getLogger(__name__)

REUSE_S = 30.0
"""How long the outcome is kept for workers, which name the manifest that they expect. Who names none is a new job and
asks the origin, which may hold other shards than a moment ago; ranks that start together share one question."""

MAX_ORIGINS = 32
"""Origins kept open; above this, those that no data set needs are closed."""

PROGRESS_INTERVAL_S = 0.1


@dataclass(slots=True, kw_only=True, eq=False)
class _Opening:
    """One data set being resolved, and everybody who waits for it."""

    outcome: asyncio.Future[Dataset | CacheloaderError]
    listeners: list[Tell] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    stage: str = "opening"
    done: int = 0
    total: int = 0
    told_s: float = 0.0

    def tell(self, stage: str, done: int, total: int, *, now_s: float) -> None:
        """Pass progress on, but not more often than somebody can look at it."""
        is_news = stage != self.stage or (done == total and done != self.done)
        self.stage, self.done, self.total = stage, done, total
        if is_news or now_s - self.told_s >= PROGRESS_INTERVAL_S:
            self.repeat(now_s=now_s)

    def repeat(self, *, now_s: float) -> None:
        """Tell the latest state again."""
        self.told_s = now_s
        for listener in list(self.listeners):
            listener(self.stage, self.done, self.total)


@dataclass(slots=True, kw_only=True, eq=False)
class _Access:
    """A store as some credentials reach it.

    Attributes:
        origin: The store.
        proven: Digests of the manifests that were found to be readable with these credentials.
        openings: Data sets being resolved with it.
        realm: Keeps its shards apart, see ``rights.realm``.
        visitor: Whose it is; ``None`` on a private daemon.
    """

    origin: Origin
    realm: str = ""
    visitor: Visitor | None = None
    openings: int = 0
    proven: set[str] = field(default_factory=set)


class Datasets:
    """Opens data sets.

    Args:
        runtime: Runs the work, and brings shards that have to be counted.
        store: Keeps manifests and sample counts.
        disk: Threads for asking it.
        shards_in_flight: Shards fetched at once in a scan.
        rights: What clients may name; ``None`` if they have all the rights that the daemon has.
    """

    def __init__(
        self, *, runtime: Runtime, store: Pool, disk: DiskThreads, shards_in_flight: int, rights: ClientRights | None
    ) -> None:
        self._rights = rights
        self._runtime = runtime
        self._store = store
        self._disk = disk
        self._shards_in_flight = shards_in_flight
        self._loop = asyncio.get_running_loop()
        self._accesses: dict[str, _Access] = {}
        self._openings: dict[str, _Opening] = {}
        self._recent: dict[str, Dataset] = {}
        self._known: WeakValueDictionary[tuple[str, int], Dataset] = WeakValueDictionary()

    async def open(
        self, block: bytes, *, digest: str, environment_counts: bool, progress: Tell, visitor: Visitor | None = None
    ) -> Dataset:
        """The data set that an encoded ``DatasetSpec`` describes.

        Args:
            block: The spec, as the client sent it.
            digest: The manifest that the client knows, "" if none.
            environment_counts: Whether the spec's own environment is used (else the daemon's is).
            progress: Called with (stage, done, total).
            visitor: Who asks; nobody else shares the outcome.

        Raises:
            StateMismatch: ``digest`` was given and the data set has another manifest now.
            CacheloaderError: As the origin, the data or the spec has it.
        """
        name = f"{_name_of(visitor)}/{hashlib.blake2b(block, digest_size=16).hexdigest()}/{digest}"
        dataset = self._recent.get(name)
        if dataset is not None:
            return dataset
        opening = self._openings.get(name)
        if opening is None:
            opening = self._openings[name] = _Opening(outcome=self._loop.create_future())
            resolve = partial(
                self._resolve, opening, block, digest, environment_counts=environment_counts, visitor=visitor
            )
            opening.task = self._runtime.spawn(self._settle(name, opening, resolve, keep=bool(digest)))
        opening.listeners.append(progress)
        try:
            outcome = await asyncio.shield(opening.outcome)
        finally:
            opening.listeners.remove(progress)
            if not opening.listeners and not opening.outcome.done() and opening.task is not None:
                # Nobody is left who wants to know. Who comes from now on begins anew.
                opening.task.cancel()
                self._forget(name, opening)
        if isinstance(outcome, CacheloaderError):
            raise outcome
        return outcome

    async def manifest_fd(self, dataset: Dataset) -> int:
        """A fresh read-only descriptor of the data set's manifest, for one client; the caller closes it."""
        digest = dataset.manifest.digest
        try:
            fd = await self._disk.take(lambda: self._store.open_manifest(digest), discard=_close)
        except DiskTrouble as error:
            log.warning("manifest %s cannot be opened: %s", digest, error)
            fd = None
        return fd if fd is not None else fdpass.sealed_memory_file("manifest", dataset.manifest.to_bytes())

    @staticmethod
    def warm() -> None:
        """Import what the first opening will need; takes a moment, so call it on a thread."""
        import cacheloader.manifest.resolve
        import cacheloader.origin.open  # noqa: F401
        import cacheloader_daemon.counting  # noqa: F401

    async def aclose(self) -> None:
        """Close all origins; calling it again does nothing."""
        accesses, self._accesses = list(self._accesses.values()), {}
        for access in accesses:
            await access.origin.aclose()

    async def _settle(
        self, name: str, opening: _Opening, resolve: Callable[[], Awaitable[Dataset]], *, keep: bool
    ) -> None:
        """Resolve, and tell the outcome to all who wait, whatever it is."""
        heart = self._runtime.spawn(self._beat(opening))
        outcome: Dataset | CacheloaderError = DaemonUnavailable("the daemon is leaving")
        try:
            outcome = await resolve()
            if keep:
                self._recent[name] = outcome
                self._loop.call_later(REUSE_S, self._recent.pop, name, None)
        except CacheloaderError as error:
            outcome = error
        except Exception as error:
            # The outer edge of a task: those who wait have to hear of it.
            log.exception("opening a data set met a defect")
            outcome = DaemonError(f"the daemon met a defect ({error!r}); its log has the traceback")
        finally:
            heart.cancel()
            self._forget(name, opening)
            opening.outcome.set_result(outcome)

    def _forget(self, name: str, opening: _Opening) -> None:
        if self._openings.get(name) is opening:
            del self._openings[name]

    async def _beat(self, opening: _Opening) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)  # a step that takes long (one large shard) gives signs of life too
            opening.repeat(now_s=self._loop.time())

    async def _resolve(
        self, opening: _Opening, block: bytes, digest: str, *, environment_counts: bool, visitor: Visitor | None
    ) -> Dataset:
        def tell(stage: str, done: int, total: int) -> None:
            opening.tell(stage, done, total, now_s=self._loop.time())

        spec = await asyncio.to_thread(frames.decode_spec, block)
        access = self._access(spec, environment_counts=environment_counts, visitor=visitor)
        access.openings += 1
        try:
            return await self._resolve_with(access, spec, digest, tell)
        finally:
            access.openings -= 1

    async def _resolve_with(self, access: _Access, spec: DatasetSpec, digest: str, tell: Tell) -> Dataset:
        # Imported late: a daemon is ready before anybody has named a data set.
        from cacheloader.manifest.resolve import resolve
        from cacheloader_daemon.counting import CacheCounter

        origin = access.origin
        if digest:
            kept = await self._kept(digest)
            if kept is not None and kept.origin_id == origin.origin_id and await self._may_read(access, kept):
                return await self._dataset(kept, access)
        counter = CacheCounter(
            origin,
            format_name=spec.format,
            runtime=self._runtime,
            store=self._store,
            disk=self._disk,
            shards_in_flight=self._shards_in_flight,
            realm=access.realm,
            visitor=access.visitor,
        )
        manifest = await resolve(spec, origin, counter, progress=tell)
        if digest and manifest.digest != digest:
            raise StateMismatch(
                f"the data set at {spec.urls[0]} is not the one that was expected: its manifest is {manifest.digest} "
                f"now ({len(manifest)} shards, {manifest.total_samples} samples) and {digest} was asked for; put the "
                "shards back as they were, or start a new run",
                uri=spec.urls[0],
            )
        access.proven.add(manifest.digest)
        if not _is_signed(spec.urls[0]):  # a signature is as good as a password, and is not written to disk
            try:
                await self._disk.run(self._store.put_manifest, manifest.digest, manifest.to_bytes())
            except DiskTrouble as error:
                log.warning("manifest %s is not kept: %s", manifest.digest, error)
        self._runtime.measure_overhead()
        return await self._dataset(manifest, access)

    async def _may_read(self, access: _Access, manifest: Manifest) -> bool:
        """Whether a manifest that others left behind may be used; to know its digest is no permission.

        Raises:
            OriginError: The store does not let this client, whose daemon is shared, see the first shard.
        """
        if self._rights is None or manifest.digest in access.proven:
            return True
        if not len(manifest):
            return False
        from cacheloader.manifest.asking import PatientOrigin

        known = manifest.shard(0)
        found = await PatientOrigin(access.origin).stat(known.uri)
        if (found.size_bytes, found.version) != (known.size_bytes, known.version):
            return False  # resolving it tells what has changed
        access.proven.add(manifest.digest)
        return True

    async def _kept(self, digest: str) -> Manifest | None:
        try:
            fd = await self._disk.take(lambda: self._store.open_manifest(digest), discard=_close)
        except DiskTrouble as error:
            log.warning("manifest %s cannot be opened: %s", digest, error)
            return None
        if fd is None:
            return None
        with os.fdopen(fd, "rb") as file:
            manifest = Manifest.from_buffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        return manifest if manifest.digest == digest else None

    async def _dataset(self, manifest: Manifest, access: _Access) -> Dataset:
        """The one object for this manifest at this origin: sessions that share it share the planner's tables."""
        origin = access.origin
        name = (manifest.digest, id(origin))
        dataset = self._known.get(name)
        if dataset is None:
            dataset = await asyncio.to_thread(
                Dataset, manifest, origin, reserve_bytes=self._store.reserve_bytes, realm=access.realm
            )
            dataset = self._known.setdefault(name, dataset)
        return dataset

    def _access(self, spec: DatasetSpec, *, environment_counts: bool, visitor: Visitor | None) -> _Access:
        from cacheloader.manifest.locate import store_of_all
        from cacheloader.origin.location import canonical_url
        from cacheloader.origin.mount import MountOrigin
        from cacheloader.origin.open import open_origin

        store = store_of_all(canonical_url(url) for url in spec.urls[:1])
        if self._rights is not None:
            self._rights.check(store, spec.storage_options, visitor=visitor)
        # Web URLs with a query, such as signed ones, are read by another engine than those without.
        url = canonical_url(spec.urls[0])
        is_signed = _is_signed(url)
        environment = spec.environment if environment_counts else None
        who = _name_of(visitor)
        identity = json.dumps([who, store, is_signed, spec.storage_options, environment], sort_keys=True, default=repr)
        # Options hold secrets; what names them must not.
        name = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        access = self._accesses.get(name)
        if access is None:
            self._close_idle_origins()
            tenant = visitor.tenant if visitor is not None else None
            origin: Origin
            if tenant is not None and store == "file:///":
                origin = MountOrigin(within=tenant.prefixes.folders)
            else:
                origin = open_origin(
                    url if is_signed else store, storage_options=spec.storage_options, environment=environment
                )
            if tenant is not None and visitor is not None:
                origin = GuardedOrigin(origin, tenant=tenant, uid=visitor.uid)
            own_realm = realm(store, spec.storage_options) if self._rights is not None else ""
            access = self._accesses[name] = _Access(origin=origin, realm=own_realm, visitor=visitor)
        return access

    def _close_idle_origins(self) -> None:
        """A daemon that lives for months meets many credentials."""
        if len(self._accesses) < MAX_ORIGINS:
            return
        used = {id(dataset.origin) for dataset in self._known.values()}
        for name, access in list(self._accesses.items()):
            if not access.openings and id(access.origin) not in used:
                del self._accesses[name]
                self._runtime.spawn(access.origin.aclose())


def _is_signed(url: str) -> bool:
    return url.lower().startswith(("http://", "https://")) and "?" in url


def _name_of(visitor: Visitor | None) -> str:
    return "" if visitor is None else f"{visitor.uid}/{visitor.owner}"


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
