"""The daemon's life: take the directory, build everything, serve, drain, leave nothing behind."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import uvloop

import cacheloader
from cacheloader.errors import DaemonUnavailable, QuotaTooSmall
from cacheloader.origin.slots import TransferSlots
from cacheloader.origin.transfer import TransferLimits
from cacheloader.protocol.messages import Welcome
from cacheloader.quantity import format_size
from cacheloader_daemon.account import Account
from cacheloader_daemon.datasets import Datasets
from cacheloader_daemon.disk import DiskThreads
from cacheloader_daemon.fetch import Fetcher
from cacheloader_daemon.garbage import no_collection
from cacheloader_daemon.memberships import Memberships
from cacheloader_daemon.metrics import MetricsServer, bind_loopback
from cacheloader_daemon.notify import Notifier
from cacheloader_daemon.plan.machine import Planner
from cacheloader_daemon.plan.options import PlannerOptions
from cacheloader_daemon.plan.shares import ShareOptions
from cacheloader_daemon.prepare import Preparers
from cacheloader_daemon.proofs import Proofs
from cacheloader_daemon.rates import Meter, OriginRate, OriginRates
from cacheloader_daemon.rights import ClientRights
from cacheloader_daemon.runtime import Runtime
from cacheloader_daemon.server.connection import ConnectionLimits
from cacheloader_daemon.server.listener import Admission, bind, inherited_from_systemd
from cacheloader_daemon.server.server import Server
from cacheloader_daemon.server.session import Session
from cacheloader_daemon.status import MAX_SESSIONS, DaemonStatus, as_json, as_metrics, seen_by
from cacheloader_daemon.storage import open_pool, scrubbing
from cacheloader_daemon.tenants import Tenant, Visitor, tenant_of
from cacheloader_daemon.watching import Watching

if TYPE_CHECKING:
    from collections.abc import Callable

    from cacheloader.fdpass import PeerCredentials
    from cacheloader_daemon.config import DaemonConfig
    from cacheloader_daemon.index_worker import IndexWorker
    from cacheloader_daemon.server.connection import Connection
    from cacheloader_daemon.store import Pool, Scrubber, Survey

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 10.0
"""After this the process ends as it is; the store is made for that."""

QUICK_THREADS = 4
BULK_THREADS = 4
"""Enough to keep an NVMe drive's queue busy with 8 MiB writes. A guess."""

DEGRADED_S = 60.0
"""How long one failure of the disk counts as a sick disk."""


def serve(config: DaemonConfig, *, indexer: IndexWorker, is_ready: Callable[[], None]) -> None:
    """Run a daemon until it is told to leave, or was idle for long enough.

    Args:
        config: How. What it says of the process holds already, see ``footing``.
        indexer: Makes the first index; closed when the daemon leaves.
        is_ready: Called once, when clients can connect.

    Raises:
        CacheUnusable: The cache directory cannot be used.
        DaemonUnavailable: Another daemon uses it.
        QuotaTooSmall: The cache may not even hold its own index.
    """
    with ExitStack() as stack:
        pool = stack.enter_context(open_pool(config))
        scrubber = stack.enter_context(scrubbing(pool, config))
        # Started when the daemon begins to leave. A thread and no timer of the loop: the loop may be what hangs, and it
        # is gone when the store is closed.
        last_resort = threading.Timer(DRAIN_TIMEOUT_S, _give_up)
        last_resort.daemon = True
        try:
            survey = pool.survey()
            if survey.overhead_bytes >= pool.quota_bytes:
                raise QuotaTooSmall(
                    f"cache_size={pool.quota_bytes} ({format_size(pool.quota_bytes)}) leaves no room for shards: the "
                    f"index, logs and manifests in {config.cache_dir} take {survey.overhead_bytes} bytes; allow "
                    "several shards more"
                )
            with _Sockets(config) as sockets, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                daemon = _Daemon(
                    config,
                    pool=pool,
                    scrubber=scrubber,
                    survey=survey,
                    sockets=sockets,
                    indexer=indexer,
                    last_resort=last_resort,
                )
                runner.run(daemon.run(is_ready))
        finally:
            stack.close()
            last_resort.cancel()


def _client_rights(config: DaemonConfig) -> ClientRights | None:
    if config.private:
        return None  # its clients are its own user
    return ClientRights(
        schemes=frozenset(config.allowed_schemes),
        local_paths=config.allow_local_paths,
        profiles=config.allow_profiles,
        endpoints=frozenset(config.allowed_endpoints),
    )


class _Sockets:
    """What the daemon listens on, bound before anything runs, so that a failure is one plain error at the start."""

    def __init__(self, config: DaemonConfig) -> None:
        self.metrics = bind_loopback(config.metrics_port) if config.metrics_port else None
        try:
            inherited = inherited_from_systemd(os.environ, pid=os.getpid())
            self.path = None if inherited is not None else config.socket_path
            self.clients = inherited if inherited is not None else bind(config.socket_path, mode=config.socket_mode)
        except BaseException:
            if self.metrics is not None:
                self.metrics.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clients.close()
        if self.metrics is not None:
            self.metrics.close()


class _Daemon:
    def __init__(
        self,
        config: DaemonConfig,
        *,
        pool: Pool,
        scrubber: Scrubber | None,
        survey: Survey,
        sockets: _Sockets,
        indexer: IndexWorker,
        last_resort: threading.Timer,
    ) -> None:
        self._last_resort = last_resort
        self._config = config
        self._pool = pool
        self._scrubber = scrubber
        self._survey = survey
        self._sockets = sockets
        self._indexer = indexer
        self._account = Account()
        self._message_meters: dict[str, Meter] = {}
        self._watching = Watching()
        self._stopping = asyncio.Event()
        self._idle: asyncio.TimerHandle | None = None

    async def run(self, is_ready: Callable[[], None]) -> None:
        """Serve, then drain."""
        self._loop = loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, f"signal {number.name}")
        notifier = Notifier(os.environ, pid=os.getpid())
        quick = DiskThreads(QUICK_THREADS, name="disk-quick")
        bulk = DiskThreads(BULK_THREADS, name="disk-bulk")
        self._preparers = preparers = Preparers(self._config.prepare_processes, self._indexer)
        metrics = MetricsServer(
            metrics=lambda: as_metrics(self._status()) + self._watching.metrics(),
            is_ready=lambda: not self._stopping.is_set(),
        )
        datasets: Datasets | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                with no_collection():
                    self._runtime = runtime = self._build_runtime(tasks, quick, bulk)
                self._pool.listen(self._vanished)
                self._datasets = datasets = Datasets(
                    runtime=runtime,
                    store=self._pool,
                    disk=quick,
                    shards_in_flight=self._config.max_fetches,
                    rights=_client_rights(self._config),
                )
                if self._sockets.metrics is not None:
                    await metrics.start(self._sockets.metrics)
                self._server = server = self._build_server()
                self._ready_s = loop.time()
                self._occupancy_changed(0)
                is_ready()
                notifier.ready(f"serving {self._config.cache_dir}")
                notifier.watch(loop, lambda: not self._stopping.is_set())
                runtime.spawn(preparers.warm())
                runtime.spawn(asyncio.to_thread(datasets.warm))
                await self._stopping.wait()  # no deadline: this is the daemon's life

                self._begin_to_leave()
                notifier.stopping()
                self._watching.leave()
                server.close("the daemon is leaving; connect again")
                runtime.stop()
        finally:
            self._begin_to_leave()
            self._pool.listen(lambda _: None)
            await metrics.aclose()
            if datasets is not None:
                await datasets.aclose()
            await preparers.aclose()
            quick.close()
            bulk.close()

    def _vanished(self, keys: list[bytes]) -> None:
        self._loop.call_soon_threadsafe(self._runtime.vanished, keys)

    def _begin_to_leave(self) -> None:
        if self._last_resort.ident is None:
            self._last_resort.start()

    def _build_runtime(self, tasks: asyncio.TaskGroup, quick: DiskThreads, bulk: DiskThreads) -> Runtime:
        config = self._config
        planner = Planner(
            PlannerOptions(
                quota_bytes=self._pool.quota_bytes,
                max_fetches=config.max_fetches,
                eviction=config.eviction,
                shares=ShareOptions(
                    guaranteed_bytes={one.name: one.guaranteed_bytes for one in config.tenants if one.guaranteed_bytes},
                    max_bytes={one.name: one.max_bytes for one in config.tenants if one.max_bytes},
                ),
            ),
            resident=[(blob.key, blob.used_bytes) for blob in self._pool.resident()],
            overhead_bytes=self._survey.overhead_bytes + self._pool.leftover_bytes,
        )
        planner.set_room(self._survey.limit_bytes, takes_shards=self._survey.takes_shards)
        self._slots = TransferSlots(
            max_bytes=config.max_transfer_bytes,
            max_requests=config.max_range_requests,
            hedge_share=config.hedge_share,
        )
        fetcher = Fetcher(
            store=self._pool,
            preparers=self._preparers,
            slots=self._slots,
            limits=TransferLimits(part_bytes=config.range_bytes),
            quick=quick,
            bulk=bulk,
            rates=OriginRates(
                OriginRate(max_bytes_per_s=config.max_bytes_per_s, max_requests_per_s=config.max_origin_requests_per_s),
                config.tenants,
            ),
            drops_behind=config.drop_behind,
        )
        return Runtime(
            planner=planner,
            fetcher=fetcher,
            account=self._account,
            tasks=tasks,
            max_memory_bytes=config.max_memory_bytes,
            overhead_bytes=self._survey.overhead_bytes,
            proofs=None if config.private else Proofs(self._loop.time),
        )

    def _build_server(self) -> Server:
        config = self._config
        uids = {os.geteuid(), *config.allowed_uids}
        gids = set(config.allowed_gids)
        for tenant in config.tenants:
            uids |= tenant.uids
            gids |= tenant.gids
        self._memberships = Memberships(self._loop) if config.look_up_groups else None
        return Server(
            self._sockets.clients,
            path=self._sockets.path,
            loop=self._loop,
            admission=Admission(uids=frozenset(uids), gids=frozenset(gids), anybody=config.allow_all_users),
            max_connections=config.max_connections,
            welcome=self._welcome,
            open_session=self._open_session,
            occupancy_changed=self._occupancy_changed,
            limits=ConnectionLimits(max_messages_per_s=config.max_messages_per_s),
            memberships=self._memberships,
        )

    def _welcome(self, version: int) -> Welcome:
        return Welcome(
            version=version,
            daemon=f"cacheloader {cacheloader.__version__}",
            pid=os.getpid(),
            quota_bytes=self._pool.quota_bytes,
        )

    def _open_session(self, connection: Connection) -> Session:
        private = self._config.private
        peer = connection.peer
        if self._memberships is not None:
            peer = self._memberships.completed(peer)
        visitor = None if private else self._visitor(peer)
        if visitor is not None and visitor.tenant is not None:
            self._admit(connection, visitor.tenant)
        return Session(
            connection,
            runtime=self._runtime,
            datasets=self._datasets,
            max_requests=self._config.max_requests,
            environment_counts=private,
            stop=(lambda: self._stop("a client's Stop")) if private else None,
            status=lambda: as_json(seen_by(visitor, self._status(), administrators={0, os.geteuid()})),
            watching=self._watching,
            visitor=visitor,
        )

    def _admit(self, connection: Connection, tenant: Tenant) -> None:
        """Count a connection for its tenant.

        Raises:
            DaemonUnavailable: He has as many as he may.
        """
        limit = tenant.max_connections
        if limit and self._server.num_connections_of(tenant.name) >= limit:
            raise DaemonUnavailable(
                f"the tenant {tenant.name!r} has as many connections as it may (max_connections={limit} of that "
                "tenant); start fewer workers, or raise the limit"
            )
        connection.owner = tenant.name
        if tenant.max_messages_per_s:
            connection.share_pace(self._message_meters.setdefault(tenant.name, Meter(tenant.max_messages_per_s)))

    def _visitor(self, peer: PeerCredentials) -> Visitor:
        """Who a connection belongs to.

        Raises:
            DaemonUnavailable: There are tenants, and he belongs to none.
        """
        tenants = self._config.tenants
        tenant = tenant_of(peer, tenants)
        administers = peer.uid in {0, os.geteuid()}
        if tenants and tenant is None and not administers:
            raise DaemonUnavailable(
                f"user {peer.uid} belongs to no tenant of this daemon; its configuration can name him (users or groups "
                "in one of tenants)"
            )
        if tenants and tenant is None:
            tenant = Tenant(name="administrators")  # sees the status, reads nothing
        return Visitor(uid=peer.uid, tenant=tenant)

    def _occupancy_changed(self, num_connections: int) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if num_connections == 0 and self._config.idle_exit_s:
            self._idle = self._loop.call_later(self._config.idle_exit_s, self._stop, "nobody was connected")

    def _stop(self, why: str) -> None:
        if not self._stopping.is_set():
            log.info("leaving: %s", why)
            self._stopping.set()

    def _status(self) -> DaemonStatus:
        own = resource.getrusage(resource.RUSAGE_SELF)
        workers = resource.getrusage(resource.RUSAGE_CHILDREN)
        account = self._account
        is_sick = account.disk_trouble_s is not None and self._loop.time() - account.disk_trouble_s < DEGRADED_S
        troubles = self._runtime.origin_troubles()
        plan, directories = self._runtime.plan_statistics(), tuple(self._pool.status())
        degraded = {
            "disk": is_sick or any(one.condition != "well" for one in directories),
            "space": plan.quota_bytes < self._pool.quota_bytes,
            "origin": bool(troubles),
        }
        return DaemonStatus(
            version=cacheloader.__version__,
            pid=os.getpid(),
            private=self._config.private,
            cache_dir=str(self._config.cache_dir),
            uptime_s=self._loop.time() - self._ready_s,
            cpu_s=own.ru_utime + own.ru_stime,
            index_cpu_s=workers.ru_utime + workers.ru_stime,
            connections=self._server.num_connections,
            degraded=tuple(reason for reason, holds in degraded.items() if holds),
            workers_lost=self._preparers.num_lost,
            plan=plan,
            directories=directories,
            scrubbed_bytes=self._scrubber.num_bytes if self._scrubber is not None else 0,
            transfers=self._slots.statistics(),
            origin_troubles=troubles,
            account=account.record(),
            sessions=tuple(self._runtime.session_records()[:MAX_SESSIONS]),
        )


def _give_up() -> None:
    """The drain hangs, in a system call of a broken disk or mount: end like a crash, which the store allows for."""
    log.error("the daemon did not drain within %g s and ends as it is", DRAIN_TIMEOUT_S)
    sys.stderr.flush()
    os._exit(1)
