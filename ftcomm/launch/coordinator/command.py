"""`ftcomm coordinator`: a coordinator by itself, for replicas that a cluster's own launcher starts."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ftcomm.control.limits import beyond
from ftcomm.control.links import MAX_HANDSHAKES
from ftcomm.control.server import CoordinatorServer, ServerError
from ftcomm.control.store import JobOver, Store, StoreError, ViewStore
from ftcomm.control.timeouts import Timeouts
from ftcomm.errors import InitError, SettingsError, TransportError
from ftcomm.launch.coordinator.admin import CoordinatorAdmin
from ftcomm.launch.dashboard_process import DashboardProcess
from ftcomm.launch.event_text import describe
from ftcomm.launch.listen import Listen
from ftcomm.launch.options import MAKE_TOKEN, TIMEOUT_OPTIONS
from ftcomm.launch.torchrun.store import TorchStore
from ftcomm.monitoring.history import HistoryWriter
from ftcomm.process.descriptors import room_for
from ftcomm.settings import chain
from ftcomm.settings.credentials import from_env
from ftcomm.sync.sched import request_short_slice

FINISHED, FAILED, STOPPED = 0, 1, 3  # exit codes

ETCD = "etcd://"  # the prefix of a --store in etcd
LEAST_HEARTBEAT = 1.0  # s, where the coordinator has to hear of etcd in that time


@dataclasses.dataclass(frozen=True)
class CoordinatorOptions:
    """The options of a coordinator. Times are seconds. Without `store` the file of views is in the working directory,
    named after the port. `standby`: wait while another coordinator has the job, and take over when it is gone; only
    with etcd."""

    replicas: int
    token: str = dataclasses.field(repr=False)
    ranks_per_replica: int = 1
    host: str = "127.0.0.1"
    port: int = 29400
    store: str | None = None
    standby: bool = False
    torch_store: int | None = None  # the port of torch's store; None: there is none
    heartbeat_timeout: float | None = None
    op_timeout: float = 120.0
    op_timeout_floor: float | None = None
    history: Path | None = None  # where interruptions are kept; None: nowhere
    dashboard: Listen | None = None  # where the live view is served; None: nowhere

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, if the options cannot work."""
        if self.replicas < 1 or self.ranks_per_replica < 1:
            raise SettingsError("--replicas and --ranks-per-replica: expected 1 or more, as in --replicas 4.")
        if reason := beyond(self.replicas, self.ranks_per_replica):
            raise SettingsError(f"--replicas and --ranks-per-replica: {reason}.")
        if not 0 <= self.port < 65536:
            raise SettingsError(f"--port {self.port}: expected 0 (any free one) to 65535.")
        if self.torch_store is not None and not 0 <= self.torch_store < 65536:
            raise SettingsError(f"--torch-store {self.torch_store}: expected 0 (any free one) to 65535.")
        if not self.token:
            raise SettingsError(f"FTCOMM_TOKEN is not set; all of a job share one secret. Make it with: {MAKE_TOKEN}")
        etcd = self.store is not None and self.store.startswith(ETCD)
        if self.standby and not etcd:
            raise SettingsError(
                f"--standby needs views that another host can read: --store {ETCD}HOST:PORT/NAME-OF-THE-JOB."
            )
        if etcd and self.timeouts.heartbeat < LEAST_HEARTBEAT:
            raise SettingsError(
                f"--heartbeat-timeout {self.timeouts.heartbeat:g} with --store {ETCD}...: a coordinator that does not "
                f"hear of etcd for that long gives up the job; expected {LEAST_HEARTBEAT:g} s or more."
            )

    @property
    def timeouts(self) -> Timeouts:
        """Returns the timeouts. Raises `SettingsError` if they cannot work together."""
        return chain(self.op_timeout, self.heartbeat_timeout, self.op_timeout_floor, TIMEOUT_OPTIONS)

    def open_store(self) -> Store:
        """Returns the store, which is not opened yet. Raises `SettingsError`."""
        if self.store is None:
            return ViewStore(Path(f"ftcomm-views-{self.port}.jsonl"))
        if not self.store.startswith(ETCD):
            return ViewStore(Path(self.store))
        try:
            from ftcomm.control.etcd import EtcdPlace
            from ftcomm.control.etcd_store import EtcdStore
        except ImportError as error:
            raise SettingsError(f"--store {ETCD}... needs etcd3gw ({error}): pip install 'ftcomm[etcd]'") from None
        try:
            place = EtcdPlace.parse(self.store, os.environ)
        except StoreError as error:
            raise SettingsError(f"{error}.") from None
        return EtcdStore(place, self.port, self.timeouts.heartbeat, self.standby)


def run(options: CoordinatorOptions) -> int:
    """Serve one job to its end; returns the exit code. Blocks. Raises `SettingsError`, `InitError`."""
    options.check()
    # The connections of leaders, probes of as many, and who has not proved yet that it holds the token.
    needed = 2 * options.replicas + MAX_HANDSHAKES
    try:
        room_for(needed, f"ftcomm coordinator, of a job with {options.replicas} replicas,")
    except TransportError as error:
        raise SettingsError(str(error)) from None
    return asyncio.run(_serve(options))


async def _serve(options: CoordinatorOptions) -> int:
    admin: CoordinatorAdmin | None = None
    dashboard: DashboardProcess | None = None

    def say(event: dict[str, Any]) -> None:
        text = event.get("reason") if event["kind"] == "failed" else describe(event)
        if text:
            _tell(text)
        if admin is not None:
            admin.event(event, text)

    views = options.open_store()
    mine = from_env(options.token)
    try:
        mine = mine if mine.job else dataclasses.replace(mine, job=views.job())
    except StoreError as error:
        raise InitError(f"the coordinator cannot start: {error}") from None
    server = CoordinatorServer(
        replicas=options.replicas,
        ranks_per_replica=options.ranks_per_replica,
        credentials=mine,
        host=options.host,
        port=options.port,
        store=views,
        timeouts=options.timeouts,
        on_event=say,
    )
    request_short_slice()
    store = None if options.torch_store is None else TorchStore(options.host, _tell, options.torch_store)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        admin = await _open_admin(options, lambda: server)
        if store is not None and not options.standby:
            await store.start()
        if not await _unless(stopped, server.start()):  # this may wait for another coordinator
            return STOPPED
        if store is not None and options.standby:  # on one host the other coordinator has had its port until now
            await store.start()
        print(_instructions(options, server.endpoint, mine.job, store), flush=True)
        if options.dashboard is not None and admin is not None:
            dashboard = DashboardProcess(admin.socket, options.dashboard, _tell)
        if await _unless(stopped, server.wait_done()):
            if server.ended:  # otherwise the job goes on, and needs what is stored
                await server.clear()
            return FAILED if server.failed else FINISHED
        _tell(f"stopped; the job goes on. Start this coordinator again with --port and --store {server.store} as now.")
        return STOPPED
    except ServerError as error:
        raise InitError(f"the coordinator cannot start: {error}") from None
    except JobOver as error:
        _tell(str(error))
        return FINISHED
    finally:
        if dashboard is not None:
            dashboard.close()
        if store is not None:
            await store.close()
        await server.stop()
        if admin is not None:
            await admin.close()


async def _open_admin(options: CoordinatorOptions, server: Callable[[], CoordinatorServer]) -> CoordinatorAdmin | None:
    """Open the admin socket; None, and a line that says so, where there is no place for it: the job needs none."""
    loop = asyncio.get_running_loop()
    history = HistoryWriter(options.history, lambda text: loop.call_soon_threadsafe(_tell, text))
    try:
        admin = CoordinatorAdmin(server, options.replicas, options.ranks_per_replica, history)
        await admin.open()
    except (OSError, SettingsError) as error:
        _tell(f"no status, live view or history of this job: {error}")
        return None
    return admin


async def _unless(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` until `stopped`; returns whether it came to its end, and raises what it raises."""
    done, signalled = asyncio.ensure_future(work), asyncio.ensure_future(stopped.wait())
    await asyncio.wait({done, signalled}, return_when=asyncio.FIRST_COMPLETED)
    signalled.cancel()
    if not done.done():
        done.cancel()
        await asyncio.wait({done})
        return False
    done.result()
    return True


def _instructions(options: CoordinatorOptions, endpoint: str, job: str, store: TorchStore | None) -> str:
    lines = [
        f"ftcomm: coordinator at {endpoint}, waiting for {options.replicas} replicas. On every replica:",
        f"  export FTCOMM_COORDINATOR={endpoint}",
        "  export FTCOMM_TOKEN=...   # the same secret as here",
        f"  export FTCOMM_JOB={shlex.quote(job)}",
        *(["  export FTCOMM_TLS_CERT=... FTCOMM_TLS_KEY=...   # its own"] if os.environ.get("FTCOMM_TLS_CERT") else []),
        f"  export FTCOMM_REPLICAS={options.replicas}",
        f"  export FTCOMM_REPLICA=0   # to {options.replicas - 1}, its own",
    ]
    if options.ranks_per_replica > 1:
        lines += [
            f"  export FTCOMM_RANKS_PER_REPLICA={options.ranks_per_replica}",
            f"  export FTCOMM_SHARD=0   # to {options.ranks_per_replica - 1}, each process its own",
            "  export FTCOMM_LEADER=HOST:PORT   # where shard 0 of this replica listens; the same on all its ranks",
        ]
    if store is not None:
        lines.append(f"  export FTCOMM_STORE={store.endpoint}")
    if options.timeouts != Timeouts.derive():
        lines += [
            f"  export FTCOMM_HEARTBEAT_TIMEOUT={options.timeouts.heartbeat:g}",
            f"  export FTCOMM_OP_TIMEOUT_FLOOR={options.timeouts.op_floor:g}",
            f"  export FTCOMM_OP_TIMEOUT={options.timeouts.op:g}",
        ]
    return "\n".join(lines)


def _tell(text: str) -> None:
    print(f"ftcomm: {text}", file=sys.stderr, flush=True)
