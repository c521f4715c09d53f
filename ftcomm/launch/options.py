"""The options of `ftcomm run`, and whether they can work."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from ftcomm.control.limits import beyond
from ftcomm.control.timeouts import INIT_TIMEOUT, Timeouts
from ftcomm.errors import SettingsError
from ftcomm.launch.hosts import HostPlacement
from ftcomm.launch.listen import Listen
from ftcomm.launch.several_hosts.node_place import NodePlace
from ftcomm.settings import TRANSPORTS, chain

TIMEOUT_OPTIONS = "--op-timeout, --heartbeat-timeout, --op-timeout-floor"
MAKE_TOKEN = "export FTCOMM_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(16))')"


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """The options. Times are seconds. `script` is a path, a module's name if `module`, or a program if `no_python`;
    `env` is for the ranks only."""

    replicas: int
    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False
    ranks_per_replica: int = 1
    host_ranks: int = 0  # so many ranks count as those of a host, which have an agent; 0: all of a replica are of one
    max_restarts: int = 10  # per replica, within an hour
    min_replicas: int = 1
    log_dir: Path | None = None
    events: Path | None = None
    transport: str = "auto"
    host: str = "127.0.0.1"
    hosts: HostPlacement | None = None  # None: they share this host's network
    node: NodePlace | None = None  # of several hosts that start the job together; None: this one starts all of it
    heartbeat_timeout: float | None = None  # derived from op_timeout by default, like op_timeout_floor
    op_timeout: float = 120.0
    op_timeout_floor: float | None = None
    init_timeout: float = INIT_TIMEOUT
    grace: float = 30.0  # to leave after a first signal
    backoff: float = 0.5  # before the first restart; doubled each time
    backoff_limit: float = 30.0
    history: Path | None = None  # where interruptions are kept; None: nowhere
    dashboard: Listen | None = None  # where the live view is served; None: nowhere
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)  # may hold secrets

    def check(self) -> None:
        """Raise `SettingsError`, with the mend, if the options cannot work. Reads the file system, changes nothing."""
        if self.replicas < 1:
            raise SettingsError(f"--replicas {self.replicas}: a job needs at least 1 replica, as in --replicas 4.")
        if self.ranks_per_replica < 1:
            raise SettingsError(
                f"--ranks-per-replica {self.ranks_per_replica}: a replica needs at least 1 rank; leave the option away "
                "for one process a replica."
            )
        if reason := beyond(self.replicas, self.ranks_per_replica):
            raise SettingsError(f"--replicas and --ranks-per-replica: {reason}.")
        if self.host_ranks and not 2 <= self.host_ranks <= self.ranks_per_replica:
            raise SettingsError(
                f"--host-ranks {self.host_ranks}: expected 2 to {self.ranks_per_replica}, the ranks of a replica; "
                "leave the option away for no host agents."
            )
        if not 1 <= self.min_replicas <= self.replicas:
            raise SettingsError(
                f"--min-replicas {self.min_replicas}: expected 1 to {self.replicas}, the number of replicas."
            )
        if self.max_restarts < 0:
            raise SettingsError(f"--max-restarts {self.max_restarts}: expected 0 (never restart) or more.")
        if self.hosts is not None:
            self.hosts.check(self.replicas)
        if self.node is not None:
            self.node.check(self.replicas)
            if self.hosts is not None:
                raise SettingsError("--hosts netns with --nnodes: namespaces stand for hosts; leave one of them away.")
            if not self.token:
                raise SettingsError(
                    f"--nnodes {self.node.count}: FTCOMM_TOKEN is not set; all hosts of a job share one secret. Make "
                    f"it once, and give it to all, with: {MAKE_TOKEN}"
                )
        if self.transport not in TRANSPORTS:
            raise SettingsError(f"--transport {self.transport}: expected one of {', '.join(TRANSPORTS)}.")
        for name in ("init_timeout", "grace", "backoff", "backoff_limit"):
            seconds = getattr(self, name)
            if not 0 < seconds < float("inf"):
                raise SettingsError(f"--{name.replace('_', '-')} {seconds}: expected a positive number of seconds.")
        _ = self.timeouts
        if self.no_python:
            if self.module:
                raise SettingsError("-m with --no-python: a module is run by Python; leave one of them away.")
            if shutil.which(self.script) is None:
                raise SettingsError(f"--no-python: there is no program {self.script}; give its path, or mend PATH.")
        elif self.module:
            check_module(self.script)
        else:
            check_script(self.script)

    @property
    def token(self) -> str:
        """Returns the secret that several hosts share; "" if there is none."""
        return {**os.environ, **self.env}.get("FTCOMM_TOKEN", "")

    @property
    def started_here(self) -> range:
        """Returns the replicas that this host starts."""
        return range(self.replicas) if self.node is None else self.node.started_here(self.replicas)

    @property
    def alike(self) -> str:
        """Returns what all hosts of a job have to be given alike, as they would be typed."""
        nodes, times = 1 if self.node is None else self.node.count, self.timeouts
        return (
            f"--nnodes {nodes} --replicas {self.replicas} --ranks-per-replica {self.ranks_per_replica} --op-timeout "
            f"{times.op:g} --heartbeat-timeout {times.heartbeat:g} --op-timeout-floor {times.op_floor:g}"
        )

    @property
    def timeouts(self) -> Timeouts:
        """Returns the timeouts. Raises `SettingsError` if they cannot work together."""
        return chain(self.op_timeout, self.heartbeat_timeout, self.op_timeout_floor, TIMEOUT_OPTIONS)

    def command(self) -> list[str]:
        """Returns the command line of a rank."""
        if self.no_python:
            return [shutil.which(self.script) or self.script, *self.args]
        return [sys.executable, "-u", *(["-m"] if self.module else []), self.script, *self.args]


def check_script(script: str) -> None:
    path = Path(script)
    if path.is_file() or (path / "__main__.py").is_file():
        if not os.access(path, os.R_OK):
            raise SettingsError(f"the script {script} cannot be read; mend its permissions (chmod u+r).")
        return
    if path.name.startswith("python"):
        raise SettingsError(
            f"{script} is no script: leave it away, the ranks run with this Python: ftcomm run ... x.py"
        )
    hint = "" if path.is_absolute() else f" in {os.getcwd()}"
    what = "is a directory without a __main__.py" if path.is_dir() else f"does not exist{hint}"
    raise SettingsError(f"the script {script} {what}; give the path of a Python file, or -m MODULE.")


def check_module(module: str) -> None:
    """Look for a module as `python -m` does, but without importing its parents, which may be slow or want a GPU."""
    path: Iterable[str] | None = None
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        try:
            spec = _find(name, path)
        except Exception:  # a finder that needs the parent imported; the rank will show the error
            return
        if spec is None:
            raise SettingsError(
                f"no module named {name} (looked in {os.getcwd()} and the packages of {sys.executable}); install it, "
                "or start from the directory that holds it."
            )
        path = spec.submodule_search_locations
    if path is not None:
        check_module(f"{module}.__main__")


def _find(name: str, path: Iterable[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        # `python -m` puts the working directory first; our own sys.path begins with the directory of a command.
        where = [os.getcwd(), *sys.path] if path is None and finder is importlib.machinery.PathFinder else path
        if (spec := finder.find_spec(name, where)) is not None:  # type: ignore[arg-type]
            return spec
    return None
