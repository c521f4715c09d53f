"""The TCP connections of a process, as the kernel counts them (`sock_diag(7)`, `struct tcp_info`). Linux only.

They say what no process says: whether what was sent arrives. Both ends of a connection count segments, so the segments
that one has sent and the other never got are known for each direction.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Container, Mapping
from typing import NamedTuple

from ftcomm.diagnosis.facts import LinkFacts, Rank

TcpEndpoint = tuple[str, int]

_NETLINK_SOCK_DIAG, _BY_FAMILY = 4, 20
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")
_MESSAGE = struct.Struct("=BBBB2s2s16s16s12xIIIII")
_INODE, _INODE_AT = struct.Struct("=I"), _MESSAGE.size - 4
_LEAST = _HEADER.size + _MESSAGE.size
_ATTRIBUTE = struct.Struct("=HH")
_INFO = 2  # INET_DIAG_INFO
_STATES = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8  # established, and those in which one side has closed
_RETRANSMITS, _HEARD, _ACKED, _OUT, _IN = 2, 52, 120, 136, 140  # offsets in tcp_info
_CLONE_NEWNET = 0x40000000
_KERNEL_TIMEOUT = 2.0  # s for the kernel to answer
_MOST = 1 << 16  # sockets of a network

_libc = ctypes.CDLL(None, use_errno=True)


class TcpConnection(NamedTuple):
    """One side of a connection: segments and bytes since it was made."""

    local: TcpEndpoint
    remote: TcpEndpoint
    waiting: int  # bytes that are not acknowledged
    retries: int  # of the oldest segment
    acknowledged: int  # bytes
    sent: int  # segments
    received: int
    heard: float  # s since data came last


def connections(owners: Mapping[Rank, tuple[int, str]]) -> dict[Rank, list[TcpConnection]]:
    """Returns the connections of processes of this user: for each its pid, and the path of the network namespace that
    they are in; "" for its own. Empty for those that cannot be read. A namespace is looked at once."""
    networks: dict[tuple[int, int], tuple[str, dict[int, Rank]]] = {}
    for rank, (pid, network) in owners.items():
        path = network or f"/proc/{pid}/ns/net"
        with contextlib.suppress(OSError):
            seen = os.stat(path)
            inodes = networks.setdefault((seen.st_dev, seen.st_ino), (path, {}))[1]
            inodes.update(dict.fromkeys(_sockets(pid), rank))
    found: dict[Rank, list[TcpConnection]] = {rank: [] for rank in owners}
    for path, inodes in networks.values():
        with contextlib.suppress(OSError):
            here = os.path.samefile(path, "/proc/thread-self/ns/net")  # threads may be in several
            for inode, connection in _dump(inodes) if here else _inside(path, inodes):
                found[inodes[inode]].append(connection)
    return found


def links(
    sides: Mapping[Rank, list[TcpConnection]], before: Mapping[Rank, list[TcpConnection]], seconds: float
) -> tuple[LinkFacts, ...]:
    """Returns the links between ranks whose connections are known on both sides; `before` are those of some `seconds`
    earlier. Pure."""
    owner = {(c.local, c.remote): rank for rank, found in sides.items() for c in found}
    side = {(c.local, c.remote): c for found in sides.values() for c in found}
    earlier = {(c.local, c.remote): c for found in before.values() for c in found}
    merged: dict[tuple[Rank, Rank], LinkFacts] = {}
    for (local, remote), sender in owner.items():
        receiver = owner.get((remote, local))
        if receiver is None or receiver == sender:
            continue
        here, there = side[local, remote], side[remote, local]
        old = earlier.get((local, remote))
        was = earlier.get((remote, local))
        rate = 0.0 if old is None else max(0, here.acknowledged - old.acknowledged) / max(seconds, 1e-9)
        known = merged.get((sender, receiver), LinkFacts(sender, receiver, lost=0))
        merged[sender, receiver] = LinkFacts(
            sender,
            receiver,
            waiting=known.waiting + here.waiting,
            retries=max(known.retries, here.retries),
            lost=(known.lost or 0) + max(0, here.sent - there.received),
            rate=known.rate + rate,
            arrived=known.arrived + (0 if was is None else max(0, there.received - was.received)),
            heard=there.heard if known.heard is None else min(known.heard, there.heard),
        )
    return tuple(merged[pair] for pair in sorted(merged))


def _sockets(pid: int) -> set[int]:
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


def _inside(path: str, wanted: Container[int]) -> list[tuple[int, TcpConnection]]:
    """Look from a thread of its own, which alone goes into the other network."""
    found: list[tuple[int, TcpConnection]] = []

    def look() -> None:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _libc.setns(fd, _CLONE_NEWNET) == 0:
                    found.extend(_dump(wanted))
            finally:
                os.close(fd)

    thread = threading.Thread(target=look, name="ftcomm-connections", daemon=True)
    thread.start()
    thread.join(2 * _KERNEL_TIMEOUT)
    return list(found)


def _dump(wanted: Container[int]) -> list[tuple[int, TcpConnection]]:
    """Returns the inode and the connection of each socket that is `wanted`, of this thread's network. Raises
    `OSError`."""
    found: list[tuple[int, TcpConnection]] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as asked:
        asked.settimeout(_KERNEL_TIMEOUT)
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES)
            asked.send(_HEADER.pack(_HEADER.size + len(body), _BY_FAMILY, _DUMP, family, 0) + body)
            while len(found) < _MOST and _take(asked.recv(1 << 18), found, wanted):
                pass
    return found


def _take(data: bytes, found: list[tuple[int, TcpConnection]], wanted: Container[int]) -> bool:
    """Whether more is to come behind these messages; connections that are `wanted` are added to `found`."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if kind in (_DONE, _ERROR) or length < _HEADER.size:
            return False
        inode = _INODE.unpack_from(data, at + _HEADER.size + _INODE_AT)[0] if length >= _LEAST else 0
        if inode in wanted and (connection := _parse(data[at + _HEADER.size : at + length])) is not None:
            found.append((inode, connection))
        at += (length + 3) & ~3
    return True


def _parse(message: bytes) -> TcpConnection | None:
    if len(message) < _MESSAGE.size:
        return None
    family, _, _, _, sport, dport, source, target, _, _, waiting, _, _ = _MESSAGE.unpack_from(message)
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if length < _ATTRIBUTE.size:
            return None
        info = message[at + _ATTRIBUTE.size : at + length]
        if kind == _INFO and len(info) >= _IN + 4:
            (acknowledged,) = struct.unpack_from("=Q", info, _ACKED)
            sent, received = struct.unpack_from("=II", info, _OUT)
            (heard,) = struct.unpack_from("=I", info, _HEARD)  # ms
            local = _address(family, source), int.from_bytes(sport, "big")
            remote = _address(family, target), int.from_bytes(dport, "big")
            return TcpConnection(local, remote, waiting, info[_RETRANSMITS], acknowledged, sent, received, heard / 1e3)
        at += (length + 3) & ~3
    return None


def _address(family: int, raw: bytes) -> str:
    address = socket.inet_ntop(family, raw[:4] if family == socket.AF_INET else raw)
    return address.removeprefix("::ffff:")
