"""Chooses the transports that UCX may use: none that opens ports, unless the network is trusted. Ports that it opens in
spite of that are reported.

UCX does not authenticate: a process that reaches a port of its TCP transport can write any memory of this process,
registered or not. So UCX gets that transport only where the network is declared trusted (`FTCOMM_TRUSTED_NETWORK=1`).
Otherwise it gets RDMA, whose keys the hardware checks, or, without RDMA, shared memory among the processes of one user,
which needs no port. A user who names transports in `UCX_TLS` gets these, unless they open ports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

TRUSTED = "FTCOMM_TRUSTED_NETWORK"

# Of shared memory only the kind that others of the group cannot open; System V's they can.
_HOST = "posix,cma,self"
_RDMA = f"rc,ud,dc,srd,{_HOST},cuda"
# Without this UCX uses no POSIX shared memory where the end of a peer must be an error.
_ENDS = {"UCX_POSIX_ERROR_HANDLING": "y"}

MEND = (
    f"Set {TRUSTED}=1 if only this job can send packets to its hosts: UCX then opens TCP ports, through which "
    "anybody who reaches them can write the memory of the process. Or set FTCOMM_TRANSPORT=tcp."
)


@dataclasses.dataclass(frozen=True)
class UcxNetwork:
    """The transports that UCX may use. It is loaded with the variables `ucx`."""

    name: str
    ucx: Mapping[str, str] = dataclasses.field(default_factory=dict)
    between_hosts: bool = True
    ports: bool = False  # it may open ports


def choose(env: Mapping[str, str], rdma: bool) -> UcxNetwork:
    """Returns the network for the variables in `env`, with (`rdma`) or without a device for RDMA."""
    if env.get(TRUSTED) == "1":
        return UcxNetwork(f"any that UCX finds ({TRUSTED}=1)", ports=True)
    if "UCX_TLS" in env:
        return UcxNetwork(f"UCX_TLS={env['UCX_TLS']}")
    tls, name = (_RDMA, "RDMA and memory of this host") if rdma else (_HOST, "memory of this host alone")
    return UcxNetwork(name, {"UCX_TLS": tls, **_ENDS}, between_hosts=rdma)


def here() -> UcxNetwork:
    """Returns the network of this process."""
    return choose(os.environ, bool(rdma_devices()))


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Returns the names of the RDMA devices with a port that is up."""
    up = []
    for state in sorted(root.glob("*/ports/*/state")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text() and state.parts[-4] not in up:
                up.append(state.parts[-4])
    return up


def rdma_available() -> bool:
    """Whether there is a device for RDMA, and NIXL is installed. FTCOMM_TRANSPORT=auto uses NIXL only then."""
    return bool(rdma_devices()) and any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12", "nixl_cu13"))


def listeners() -> frozenset[str]:
    """Returns the addresses at which this process accepts TCP connections, in the network of the calling thread."""
    ours = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            kind, _, inode = os.readlink(f"/proc/self/fd/{entry}").partition(":")
        except FileNotFoundError:  # closed meanwhile
            continue
        if kind == "socket":
            ours.add(inode.strip("[]"))
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/thread-self/net", table).read_text().splitlines()[1:]
        except FileNotFoundError:  # a kernel without IPv6
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and fields[9] in ours:
                found.add(_address(fields[1]))
    return frozenset(found)


_LISTEN = "0A"  # a state, as the kernel prints it


def _address(text: str) -> str:
    """`0100007F:1F90` is 127.0.0.1:8080: words of 32 bits in the order of this machine."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    ip = ipaddress.ip_address(socket.inet_ntop(family, packed))
    return f"[{ip}]:{int(port, 16)}" if ip.version == 6 else f"{ip}:{int(port, 16)}"
