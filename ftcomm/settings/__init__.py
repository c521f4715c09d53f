"""The settings of one rank, from its environment (set by `ftcomm run` or by hand)."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from typing import Any, overload

from ftcomm.control.limits import KERNEL_MEMBERS, beyond
from ftcomm.control.timeouts import INIT_TIMEOUT, Timeouts
from ftcomm.errors import SettingsError
from ftcomm.settings.engines import ENGINES, KINDS, engine_kind
from ftcomm.settings.launchers import completed
from ftcomm.settings.tuning import BUILT_IN, Tuning

TRANSPORTS = ("auto", "shm", "nixl", "tcp")
STAGINGS = ("auto", "device", "host")
ALGORITHMS = ("auto", "direct", "ring")
DATA = ("none", "mac", "aes-gcm")
MAX_LABEL = 256  # characters, as of a `Name` in ftcomm.control.field_types


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one rank; `ftcomm.init` takes those of the environment. Times are seconds.

    leader: where shard 0 of this replica listens; unused with one rank a replica.
    host_agent: where the host agent listens, in a replica of which each host has `host_ranks` ranks.
    """

    coordinator: str
    token: str = dataclasses.field(repr=False)
    replica: int
    replicas: int
    shard: int = 0  # index of this rank inside its replica
    ranks_per_replica: int = 1
    leader: str = ""
    leader_fd: int | None = None
    host_agent: str = ""  # "": the ranks of all hosts connect to the leader
    host_ranks: int = 0
    host_agent_fd: int | None = None
    transport: str = "auto"
    host: str = "127.0.0.1"  # an address or interface to listen on; "": as the way to the coordinator has it
    timeouts: Timeouts = dataclasses.field(default_factory=Timeouts.derive)
    init_timeout: float = INIT_TIMEOUT
    verify: bool = False  # compare the results of all members after every op
    engine: str = "auto"  # what runs ops, see `ftcomm.engines.registry`
    max_sms: int | None = None  # programs of a kernel that runs an op, at most; None: as many as pay
    algorithm: str = "auto"  # of large all-reduces between hosts: two levels if hosts are shared, or direct, or a ring
    rack: str = ""  # a label of where this host stands; a ring stays in a rack before it goes on to the next
    tuning: Tuning = BUILT_IN  # switch points, from a file of `ftcomm bench tune`
    staging: str = "auto"  # of gpu-kernel: in GPU memory, pinned host memory, or as the GPUs can reach each other
    job: str = ""  # its name, which all processes of it have alike
    tls: tuple[str, str, str] | None = None  # files for control, state and messages: certificate, key, authority or ""
    data: str = "none"  # what frames of the data plane have between hosts: nothing, a MAC, or AES-GCM

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Reads `env`, by default the environment of this process (docs/settings.md). Raises `SettingsError`."""
        env = os.environ if env is None else env
        if "FTCOMM_COORDINATOR" not in env:
            raise SettingsError(
                "FTCOMM_COORDINATOR is not set, so there is no job to join. Start the script with "
                "`ftcomm run --replicas 4 SCRIPT`, or set it to host:port of a running `ftcomm coordinator`."
            )
        env = completed(env)
        ranks = _int(env, "FTCOMM_RANKS_PER_REPLICA", 1)
        settings = cls(
            coordinator=env["FTCOMM_COORDINATOR"],
            token=env.get("FTCOMM_TOKEN", ""),
            replica=_int(env, "FTCOMM_REPLICA"),
            replicas=_int(env, "FTCOMM_REPLICAS"),
            shard=_int(env, "FTCOMM_SHARD", 0 if ranks == 1 else None),
            ranks_per_replica=ranks,
            leader=env.get("FTCOMM_LEADER", ""),
            leader_fd=_int(env, "FTCOMM_LEADER_FD") if "FTCOMM_LEADER_FD" in env else None,
            host_agent=env.get("FTCOMM_HOST_AGENT", ""),
            host_ranks=_int(env, "FTCOMM_HOST_RANKS", 0),
            host_agent_fd=_int(env, "FTCOMM_HOST_AGENT_FD") if "FTCOMM_HOST_AGENT_FD" in env else None,
            host=env.get("FTCOMM_HOST", ""),
            **own(env),
        )
        settings.check()
        return settings

    def check(self) -> None:
        """Raise `SettingsError` on values that cannot work."""
        split_endpoint(self.coordinator, "FTCOMM_COORDINATOR")
        if not self.token:
            raise SettingsError("FTCOMM_TOKEN is empty; set it to the token of the job's coordinator.")
        if self.transport not in TRANSPORTS:
            raise SettingsError(f"FTCOMM_TRANSPORT={self.transport!r}; expected one of {', '.join(TRANSPORTS)}.")
        self.check_engine()
        check_data(self.data)
        if self.data != "none" and self.transport == "nixl":
            raise SettingsError(
                f"FTCOMM_DATA={self.data} with FTCOMM_TRANSPORT=nixl, whose puts go from memory to memory and are "
                "looked at by nobody; set FTCOMM_TRANSPORT=tcp, or unset FTCOMM_DATA and trust the network."
            )
        if len(self.job) > MAX_LABEL:
            raise SettingsError(
                f"FTCOMM_JOB has {len(self.job)} characters, at most {MAX_LABEL}; choose a shorter one."
            )
        if self.staging not in STAGINGS:
            raise SettingsError(f"FTCOMM_STAGING={self.staging!r}; expected one of {', '.join(STAGINGS)}.")
        if self.algorithm not in ALGORITHMS:
            raise SettingsError(f"FTCOMM_ALGORITHM={self.algorithm!r}; expected one of {', '.join(ALGORITHMS)}.")
        if len(self.rack) > MAX_LABEL:
            raise SettingsError(
                f"FTCOMM_RACK has {len(self.rack)} characters, at most {MAX_LABEL} are told to others; choose a "
                "shorter label for the rack."
            )
        if self.max_sms is not None and self.max_sms < 1:
            raise SettingsError(f"FTCOMM_SMS={self.max_sms}; expected at least 1, or unset it for as many as pay.")
        if not 0 <= self.replica < self.replicas:
            raise SettingsError(
                f"FTCOMM_REPLICA={self.replica} of FTCOMM_REPLICAS={self.replicas}; expected a replica number from 0 "
                "to one less than there are replicas, of which there is at least one."
            )
        if reason := beyond(self.replicas, self.ranks_per_replica):
            raise SettingsError(f"FTCOMM_REPLICAS and FTCOMM_RANKS_PER_REPLICA: {reason}.")
        if not 0 <= self.shard < self.ranks_per_replica:
            raise SettingsError(
                f"FTCOMM_SHARD={self.shard} with FTCOMM_RANKS_PER_REPLICA={self.ranks_per_replica}; expected the index "
                f"of the rank in its replica, 0 to {self.ranks_per_replica - 1}."
            )
        if self.ranks_per_replica > 1 and not self.leader:
            raise SettingsError(
                "FTCOMM_LEADER is not set; with several ranks a replica each needs host:port of shard 0."
            )
        if self.leader:
            split_endpoint(self.leader, "FTCOMM_LEADER")
        if self.host_agent:
            split_endpoint(self.host_agent, "FTCOMM_HOST_AGENT")
            if self.host_ranks < 1:
                raise SettingsError(
                    f"FTCOMM_HOST_AGENT={self.host_agent} with FTCOMM_HOST_RANKS={self.host_ranks}; set that to how "
                    "many ranks of the replica each host has, so that the first one there starts the agent."
                )

    def check_engine(self) -> None:
        """Raise `SettingsError`, with what to type, if the engine does not exist, or does not go with the other
        settings."""
        name = self.engine
        if name not in {*ENGINES, *KINDS}:
            raise SettingsError(f"FTCOMM_ENGINE={name!r}; expected one of {', '.join(ENGINES)}.")
        kind = engine_kind(name)
        if not kind.runs_ops:
            if self.staging != "auto":
                raise SettingsError(
                    f"FTCOMM_STAGING={self.staging} with FTCOMM_ENGINE={name}, which stages in host memory; unset it, "
                    "or set FTCOMM_ENGINE=gpu-kernel."
                )
            return
        if self.replicas > KERNEL_MEMBERS:
            raise SettingsError(
                f"FTCOMM_REPLICAS={self.replicas} with FTCOMM_ENGINE={name}, whose kernels have room for "
                f"{KERNEL_MEMBERS} replicas; set FTCOMM_ENGINE={kind.reducer} or host, or start at most "
                f"{KERNEL_MEMBERS}."
            )
        for wrong, setting, why in (
            (self.transport not in ("auto", "shm"), f"FTCOMM_TRANSPORT={self.transport}", "need memory that all share"),
            (self.algorithm == "ring", "FTCOMM_ALGORITHM=ring", "read the memory of all others"),
            (self.verify, "FTCOMM_VERIFY=1", "do not compare results yet"),
        ):
            if wrong:
                raise SettingsError(
                    f"{setting} with FTCOMM_ENGINE={name}, whose kernels run whole ops and {why}; unset "
                    f"{setting.partition('=')[0]}, or set FTCOMM_ENGINE={kind.reducer} or host."
                )


def tls_files(env: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The files of a certificate that `env` names. Raises `SettingsError` if something is missing."""
    cert, key, ca = (env.get(f"FTCOMM_TLS_{what}", "") for what in ("CERT", "KEY", "CA"))
    if not (cert or key or ca):
        return None
    if not cert or not key:
        raise SettingsError(
            "TLS needs FTCOMM_TLS_CERT and FTCOMM_TLS_KEY, a certificate and its key, on every process, and "
            "FTCOMM_TLS_CA goes with both; set them, or none."
        )
    return cert, key, ca


def check_data(mode: str) -> None:
    """Raise `SettingsError` unless it is one of `DATA`, and what it needs is installed."""
    if mode not in DATA:
        raise SettingsError(f"FTCOMM_DATA={mode!r}; expected one of {', '.join(DATA)}.")
    if mode != "none" and importlib.util.find_spec("cryptography") is None:
        raise SettingsError(f"FTCOMM_DATA={mode} needs cryptography: pip install 'ftcomm[secure]'.")


def own(env: Mapping[str, str]) -> dict[str, Any]:
    """Returns what a rank takes from its environment, however it was started. Raises `SettingsError`."""
    return dict(
        transport=env.get("FTCOMM_TRANSPORT", "auto"),
        timeouts=timeouts(env),
        init_timeout=_seconds(env, "FTCOMM_INIT_TIMEOUT", INIT_TIMEOUT),
        verify=_flag(env, "FTCOMM_VERIFY"),
        engine=env.get("FTCOMM_ENGINE", "auto"),
        max_sms=_int(env, "FTCOMM_SMS") if "FTCOMM_SMS" in env else None,
        staging=env.get("FTCOMM_STAGING", "auto"),
        algorithm=env.get("FTCOMM_ALGORITHM", "auto"),
        rack=env.get("FTCOMM_RACK", ""),
        tuning=_tuning(env.get("FTCOMM_TUNING", "")),
        job=env.get("FTCOMM_JOB", ""),
        tls=tls_files(env),
        data=env.get("FTCOMM_DATA", "none"),
    )


def timeouts(env: Mapping[str, str]) -> Timeouts:
    """Raises `SettingsError`."""
    return chain(
        _seconds(env, "FTCOMM_OP_TIMEOUT", Timeouts.derive().op),
        _seconds(env, "FTCOMM_HEARTBEAT_TIMEOUT", None),
        _seconds(env, "FTCOMM_OP_TIMEOUT_FLOOR", None),
        "FTCOMM_OP_TIMEOUT, FTCOMM_HEARTBEAT_TIMEOUT, FTCOMM_OP_TIMEOUT_FLOOR",
    )


def chain(op: float, heartbeat: float | None, op_floor: float | None, names: str) -> Timeouts:
    """The chain of timeouts; raises `SettingsError`, with `names` of what sets them, on one that cannot work."""
    try:
        return Timeouts.derive(op, heartbeat, op_floor)
    except ValueError as error:
        raise SettingsError(f"{names}: {error}.") from None


def split_endpoint(endpoint: str, name: str) -> tuple[str, int]:
    """`host:port` -> (host, port); raises `SettingsError` that names the variable."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SettingsError(f"{name}={endpoint!r}; expected host:port, as in 127.0.0.1:29400.")
    return host.strip("[]"), int(port)


def _tuning(path: str) -> Tuning:
    if not path:
        return BUILT_IN
    from ftcomm.settings.tuning_file import load  # what reads it is more than the rest of the settings

    return load(path)


def _int(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None:
        if default is None:
            raise SettingsError(
                f"{name} is not set; `ftcomm run` sets it, and torchrun, mpirun and srun say it; by hand use e.g. "
                f"{name}=0."
            )
        return default
    try:
        return int(value)
    except ValueError:
        raise SettingsError(f"{name}={value!r}; expected an integer.") from None


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "0")
    if value not in ("0", "1", ""):
        raise SettingsError(f"{name}={value!r}; expected 1 (on) or 0 (off).")
    return value == "1"


@overload
def _seconds(env: Mapping[str, str], name: str, default: float) -> float: ...
@overload
def _seconds(env: Mapping[str, str], name: str, default: None) -> float | None: ...
def _seconds(env: Mapping[str, str], name: str, default: float | None) -> float | None:
    value = env.get(name)
    if value is None:
        return default
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise SettingsError(f"{name}={value!r}; expected a positive number of seconds.")
    return seconds
