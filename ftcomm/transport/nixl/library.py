"""The NIXL library: which flavour is installed, its agents, its errors as ours, and the log of UCX.

NIXL moves memory by UCX, which chooses among what it finds: InfiniBand and RoCE, EFA, TCP, the memory of another
process of the host. Only its log tells the choice, at the level "info": the lanes of each connection and, with
UCX_PROTO_INFO, a table for each kind of operation. The lanes alone mislead: puts within a host go by CMA, which is
listed as a lane for messages. So that log goes to a file in memory, from which `said` takes it, unless the user has set
UCX_LOG_LEVEL or UCX_LOG_FILE.

`ftcomm.transport.nixl.network` says which transports UCX gets, and why.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib
import importlib.metadata
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ftcomm.control.wire import no_ports
from ftcomm.errors import TransportError
from ftcomm.transport.nixl.network import MEND as TRUST
from ftcomm.transport.nixl.network import UcxNetwork, listeners

log = logging.getLogger("ftcomm.transport")

_FLAVOURS = ("nixl", "nixl_cu13", "nixl_cu12")  # the first loads one of the others
MEND = "Install it with `pip install 'ftcomm[rdma]'` (`ftcomm[cuda12]`, `ftcomm[cuda13]`), or set FTCOMM_TRANSPORT=tcp."

_LANES = re.compile(r"UCX\s+INFO\s+.*?(\S+ cfg#\d+) +(.*)$")
_TABLE = re.compile(r"\]\s+\|\s*(.*?)\s*\|$")
_OF = re.compile(r".*?(\S+ cfg#\d+)$")
_PUTS = re.compile(r"remote memory write by ucp_put\S* from (\S+) memory")
_ALL_ABOVE = re.compile(r"\d+\.\.inf")  # the last line of a table, for large sizes
_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_TROUBLE = re.compile(r"UCX\s+(?:WARN|ERROR|FATAL)\s+(.*)$")
_ABSENT = re.compile(r"transports? .* (?:is|are) not available")  # no host has all that are named here


class NixlMissing(TransportError):
    """NIXL is not installed, or cannot be loaded."""


@dataclasses.dataclass(frozen=True)
class UcxPath:
    """The path that UCX has chosen between two agents."""

    where: str  # "intra-node", "inter-node", "self"
    lanes: tuple[tuple[str, str], ...]  # (purpose, transport/device ...)

    def __str__(self) -> str:
        return ", ".join(f"{what} by {by}" for what, by in self.lanes)


class NixlLibrary:
    """The loaded library; use `load`. `errors` are the exceptions that its calls raise, which have no common base."""

    def __init__(self) -> None:
        self.name, api = self._find()
        bindings = importlib.import_module(api.__name__.rpartition(".")[0] + "._bindings")
        self._api = api
        self.errors: tuple[type[Exception], ...] = tuple(
            error
            for name in dir(bindings)
            if isinstance(error := getattr(bindings, name), type) and issubclass(error, Exception)
        )
        self.version = self._version()
        self.ucx = "unknown"
        self._paths = UcxPaths()

    def agent(self, name: str, devices: str, network: UcxNetwork) -> Any:
        """Makes an agent that goes through UCX. `devices` is as in UCX_NET_DEVICES, or "" to leave the choice to that
        or to UCX. Raises `TransportError`, also if UCX opens ports that `network` does not allow."""
        before = listeners()
        with socket.socket() as sock:
            try:
                if not network.ucx:  # then UCX may listen by itself, and looks for a port until there is one
                    sock.bind(("", 0))
            except OSError:
                raise TransportError(f"NIXL {self.version} cannot start: {no_ports()}") from None
        failures: tuple[type[Exception], ...] = (*self.errors, RuntimeError)
        try:
            with _log.capturing(network.ucx):  # the first one loads UCX
                config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[])
                agent = self._api.nixl_agent(name, config)
                agent.create_backend("UCX", {"ucx_devices": devices} if devices else {})
        except failures as error:
            devices = devices or os.environ.get("UCX_NET_DEVICES", "all")
            raise TransportError(
                f"NIXL {self.version} cannot start UCX on devices {devices}, transports "
                f"{network.ucx.get('UCX_TLS') or os.environ.get('UCX_TLS', 'all')}: {describe(error)}. See `ftcomm "
                "doctor`; UCX_NET_DEVICES and UCX_TLS choose among what it lists."
            ) from error
        opened = ", ".join(sorted(listeners() - before))
        tls = os.environ.get("UCX_TLS")
        if opened and not network.ports and tls and tls != network.ucx.get("UCX_TLS"):
            raise TransportError(f"with UCX_TLS={tls} UCX listens at {opened}. Unset UCX_TLS. {TRUST}")
        if opened:  # with transports that are ours, another thread of this process may have opened it
            log.warning(
                "UCX listens at %s: whoever reaches that can write the memory of this process, without a token", opened
            )
        return agent

    def said(self) -> tuple[list[UcxPath], list[str]]:
        """Returns what UCX has logged since the last call: the paths that it has chosen, and its warnings and
        errors."""
        paths, troubles = [], []
        for line in _log.lines():
            if found := _VERSION.search(line):
                self.ucx = found[1].rstrip(",")
            elif path := self._paths.read(line):
                paths.append(path)
            elif (found := _TROUBLE.search(line)) and not _ABSENT.match(found[1]):
                troubles.append(found[1])
        return paths, troubles

    def _find(self) -> tuple[str, Any]:
        broken = []
        with _log.capturing():
            for flavour in _FLAVOURS:
                try:
                    return flavour, importlib.import_module(f"{flavour}._api")
                except ModuleNotFoundError as error:
                    if error.name != flavour:
                        broken.append(f"{flavour}: {error}")
                except ImportError as error:  # a shared library that it needs is missing
                    broken.append(f"{flavour}: {error}")
        if broken:
            raise NixlMissing(f"NIXL is installed and cannot be loaded: {'; '.join(broken)}. {MEND}")
        raise NixlMissing(f"NIXL is not installed. {MEND}")

    def _version(self) -> str:
        for name in ("nixl-cu13", "nixl-cu12", "nixl"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return "unknown"


class UcxPaths:
    """Reads what UCX says of its connections, line by line."""

    def __init__(self) -> None:
        self._messages: dict[str, str] = {}  # connection -> the lane of short messages
        self._connection = ""  # the connection of the table
        self._memory = ""  # the source of the puts in the table; "": it is about something else

    def read(self, line: str) -> UcxPath | None:
        """Returns the path of large puts and of messages, once this line has completed it."""
        table = _TABLE.search(line)
        if table is None:
            if found := _LANES.search(line):
                lanes = dict(reversed(re.findall(r"(\w+)\(([^ )]*)", found[2])))
                self._messages[found[1]] = lanes.get("am", "")
            return None
        cells = [cell.strip() for cell in table[1].split("|")]
        if len(cells) == 1:
            if found := _OF.match(cells[0]):
                self._connection = found[1]
            found = _PUTS.match(cells[0])
            self._memory = found[1] if found else ""
        elif len(cells) == 3 and self._memory and _ALL_ABOVE.fullmatch(cells[0]):
            puts = "puts" if self._memory == "host" else f"puts of {self._memory} memory"
            lanes = {puts: cells[2], "messages": self._messages.get(self._connection, "")}
            return UcxPath(self._connection.split()[0], tuple((what, by) for what, by in lanes.items() if by))
        return None


def speed(path: UcxPath) -> str:
    """Returns the rate of the devices of a path, as the kernel tells it; "" if it does not."""
    said = {}
    for _, by in path.lanes:
        for lane in by.split():
            device = lane.partition("/")[2].partition(":")[0]
            rate = link_rate(device)
            if rate:
                said[device] = rate
    return ", ".join(f"{device} {rate}" for device, rate in said.items())


def link_rate(device: str, root: Path = Path("/sys/class")) -> str:
    """Returns the rate of an RDMA device (its first port) or of a network interface; "" if the kernel does not know
    it."""
    for file, form in (
        (root / "infiniband" / device / "ports" / "1" / "rate", "{}"),  # 100 Gb/sec (4X EDR)
        (root / "net" / device / "speed", "{} Mb/s"),
    ):
        try:
            rate = file.read_text().strip()
        except (OSError, ValueError):
            continue
        if rate and rate != "-1":
            return form.format(rate)
    return ""


def describe(error: BaseException) -> str:
    """Describes an error: `nixlRemoteDisconnectError` as NIXL_ERR_REMOTE_DISCONNECT, other errors by their text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class _Log:
    """The log of UCX, in memory that UCX opens as a file when it is loaded."""

    def __init__(self) -> None:
        self._environment = threading.Lock()  # there is one
        self._fd = -1
        self._reading = threading.Lock()  # guards what follows: several endpoints of a process ask for the one log
        self._read = 0
        self._rest = b""
        self._flush: Callable[[], object] | None = None

    @contextlib.contextmanager
    def capturing(self, variables: Mapping[str, str] = {}) -> Iterator[None]:
        """Make UCX, if it is loaded in this context, log to our file and find these `variables`, unless the user has
        set them. It reads the environment of the process when it is loaded. `os.environ` does not show them: another
        thread that chooses its network meanwhile would take them for the user's."""
        with self._environment:
            yield from self._set(variables)

    def _set(self, variables: Mapping[str, str]) -> Iterator[None]:
        ours = {name: value for name, value in variables.items() if name not in os.environ}
        if not any(name in os.environ for name in ("UCX_LOG_LEVEL", "UCX_LOG_FILE")):
            if self._fd < 0:
                self._fd = os.memfd_create("ftcomm-ucx-log", os.MFD_CLOEXEC)
            ours |= {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": f"/proc/self/fd/{self._fd}", "UCX_PROTO_INFO": "y"}
        quiet = "NIXL_LOG_LEVEL" not in os.environ
        for name, value in ours.items():
            os.putenv(name, value)
        if quiet:
            os.environ["NIXL_LOG_LEVEL"] = "FATAL"  # a lost peer is also an exception; its Python reads it here
        try:
            yield
        finally:
            for name in ours:
                os.unsetenv(name)
            if quiet:
                del os.environ["NIXL_LOG_LEVEL"]

    def lines(self) -> list[str]:
        if self._fd < 0:
            return []
        with self._reading:
            if self._flush is None:
                self._flush = _flusher()
            self._flush()
            size = os.fstat(self._fd).st_size
            new = os.pread(self._fd, size - self._read, self._read)
            self._read += len(new)
            *lines, self._rest = (self._rest + new).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def _flusher() -> Callable[[], object]:
    """Returns the function of UCX that flushes its log, which it otherwise buffers."""
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "/libucs-" in line or "/libucs.so" in line}
    for path in paths:
        flush = getattr(ctypes.CDLL(path), "ucs_log_flush", None)
        if flush is not None:
            return flush  # type: ignore[no-any-return]
    return lambda: None


_log = _Log()
_loading = threading.Lock()
_library: NixlLibrary | None = None


def load() -> NixlLibrary:
    """Loads the library, once in a process (0.15 s). Any thread. Raises `NixlMissing`."""
    global _library
    with _loading:
        if _library is None:
            _library = NixlLibrary()
        return _library
