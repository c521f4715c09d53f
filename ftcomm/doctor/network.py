"""Checks what ranks on several hosts need of the network: an address, a way to the coordinator and to each other, free
ports.

`ftcomm doctor --serve` on one host and `ftcomm doctor --peer THERE` on another try the way between the two. They begin
with the handshake of all connections of ftcomm. So a wrong token, another version and packets that get lost for their
length are found as in a job.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from ftcomm.control import handshake, wire
from ftcomm.control.links import Listener, listen
from ftcomm.control.sealed import Channel
from ftcomm.doctor.check import Finding
from ftcomm.errors import InitError, SettingsError
from ftcomm.settings import split_endpoint
from ftcomm.settings.credentials import from_env
from ftcomm.transport.address import interfaces, listed, mtu, own_address, resolved

PURPOSE = "doctor"
CONNECT_TIMEOUT = 3.0  # s for a connection
NO_TOKEN = "FTCOMM_TOKEN is not set"
DATA = 64 << 20  # bytes that are sent to measure
LONGEST = 2.0  # s of sending them
FEW = 1000  # ports; a rank takes some for each other member

_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_OPEN = ("tcp", "tcp6")  # in /proc/net


def address() -> list[Finding]:
    """The address that the others will be told, and why this one."""
    asked = os.environ.get("FTCOMM_HOST", "")
    endpoint = os.environ.get("FTCOMM_COORDINATOR", "")
    try:
        towards = split_endpoint(endpoint, "FTCOMM_COORDINATOR") if endpoint else ("127.0.0.1", 1)
        host = own_address(asked, towards, "FTCOMM_COORDINATOR")
    except SettingsError as error:
        mend = "unset FTCOMM_HOST" if asked else "set FTCOMM_COORDINATOR to host:port of the coordinator"
        return [Finding("address", "wrong", str(error), mend)]
    name = next((name for name, own in interfaces().items() if own == host), None)
    if name is None:
        return [
            Finding(
                "address",
                "wrong",
                f"FTCOMM_HOST={asked} is {host}, none of this host's ({listed()})",
                "set FTCOMM_HOST to one of them, or to the name of an interface",
            )
        ]
    if not asked and not endpoint:
        said = f"neither FTCOMM_COORDINATOR nor FTCOMM_HOST is set, so ranks are reached from this host alone ({host})"
        return [Finding("address", "note", said, "on a cluster, run this with the variables of a rank")]
    why = f"FTCOMM_HOST={asked}" if asked else f"as the way to FTCOMM_COORDINATOR={endpoint} leaves from there"
    return [Finding("address", "ok", f"{host}, interface {name} (MTU {mtu(name)}): {why}; this host has {listed()}")]


def coordinator() -> list[Finding]:
    """Whether it is there, and holds our token."""
    endpoint = os.environ.get("FTCOMM_COORDINATOR")
    if endpoint is None:
        return []
    token = os.environ.get("FTCOMM_TOKEN", "")
    if not token:
        mend = "export FTCOMM_TOKEN=...   # that of the coordinator"
        return [Finding("coordinator", "wrong", f"{NO_TOKEN}, so no process of the job lets this rank in", mend)]
    try:
        there = split_endpoint(endpoint, "FTCOMM_COORDINATOR")
    except SettingsError:
        return []  # `address` has said it
    found = _reach("coordinator", there, from_env(token))
    return [found] if isinstance(found, Finding) else [_close(found, "coordinator", endpoint)]


def ports() -> list[Finding]:
    """Each rank listens at a port that the kernel chooses; firewalls have to let these through."""
    least, most = (int(word) for word in _PORTS.read_text().split())
    used = set()
    for name in _OPEN:
        lines = Path("/proc/net", name).read_text().splitlines()[1:]
        used |= {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    left = most - least + 1 - sum(least <= port <= most for port in used)
    said = f"ranks listen at ports from {least} to {most}, of which {left} are free"
    if left < FEW:
        return [Finding("ports", "wrong", said, "sysctl -w net.ipv4.ip_local_port_range='10240 65535'")]
    return [Finding("ports", "ok", f"{said}; hosts of a job have to let each other through there")]


def peer(where: str) -> list[Finding]:
    """The way to another host, on which `ftcomm doctor --serve` runs."""
    there = split_endpoint(where, "--peer")
    token = os.environ.get("FTCOMM_TOKEN")
    if not token:
        mend = f"FTCOMM_TOKEN=... ftcomm doctor --peer {where}   # with what ftcomm doctor --serve has printed there"
        return [Finding(f"peer {where}", "wrong", NO_TOKEN, mend)]
    found = _reach(f"peer {where}", there, from_env(token))
    if isinstance(found, Finding):
        return [found]
    sock, took = found
    with sock:
        segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        try:
            rate = _measure(sock)
        except OSError as error:
            mend = f"look for what resets connections between the hosts; at {where}: ftcomm doctor --serve"
            return [Finding(f"peer {where}", "wrong", f"the connection broke while data were sent: {error}", mend)]
        said = (
            f"from {sock.getsockname()[0]}: a handshake takes {1e3 * took:.1f} ms, one connection carries "
            f"{8e-9 * rate:.2f} Gbit/s, in packets of {segment} bytes"
        )
    return [Finding(f"peer {where}", "ok", said)]


def where() -> str:
    """The one address at which other hosts reach this one: what the environment says, or the only one that there is.

    Never all of them: one may lead to a network where strangers could reach us. Raises `SettingsError`.
    """
    endpoint = os.environ.get("FTCOMM_COORDINATOR")
    asked = os.environ.get("FTCOMM_HOST", "")
    if endpoint is None:
        if asked:
            return resolved(asked)
        own = {host for host in interfaces().values() if not ipaddress.ip_address(host).is_loopback}
        if len(own) != 1:
            raise SettingsError(
                f"FTCOMM_HOST is not set, and this host has {listed()}; set it to the address, or to the interface, at "
                "which the other hosts reach it."
            )
        return own.pop()
    return own_address(asked, split_endpoint(endpoint, "FTCOMM_COORDINATOR"), "FTCOMM_COORDINATOR")


def serve(host: str, port: int, say: Callable[[str], None]) -> None:
    """Answer doctors on other hosts that have our token until interrupted: FTCOMM_TOKEN, or a fresh one, which is said.
    Raises `InitError`."""
    try:
        sock = listen(host, port)
    except OSError as error:
        raise InitError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; this host has {listed()}. Choose another port."
        ) from None
    token = os.environ.get("FTCOMM_TOKEN", "")
    how = "with the same FTCOMM_TOKEN: "
    if not token:
        token = secrets.token_hex(16)
        how = f"FTCOMM_TOKEN={token} "
    say(f"on another host, {how}ftcomm doctor --peer {host}:{sock.getsockname()[1]}")
    asyncio.run(_serve(sock, from_env(token), say))


async def _serve(sock: socket.socket, mine: handshake.Credentials, say: Callable[[str], None]) -> None:
    async def answer(channel: Channel, opening: handshake.Opening) -> None:
        """Take what comes, and say at the end how much it was."""
        loop = asyncio.get_running_loop()
        with channel.detach() as peer:  # what is measured is the network
            received = 0
            while data := await loop.sock_recv(peer, 1 << 20):
                received += len(data)
            say(f"{peer.getpeername()[0]} has sent {received >> 20} MB")
            await loop.sock_sendall(peer, received.to_bytes(8, "big"))

    listener = Listener(sock, mine, answer)
    try:
        await asyncio.Event().wait()
    finally:
        await listener.close()


def _reach(name: str, there: tuple[str, int], mine: handshake.Credentials) -> tuple[socket.socket, float] | Finding:
    """A connection and how long it took; or what is wrong."""
    begun = time.monotonic()
    where = f"{there[0]}:{there[1]}"
    try:
        return wire.connect(there, mine, PURPOSE, {}, CONNECT_TIMEOUT).detach(), time.monotonic() - begun
    except handshake.HandshakeError as error:
        return Finding(name, "wrong", f"{where} was reached, but {error}", "mend what it says, and run this again")
    except TimeoutError:
        within = f"within {CONNECT_TIMEOUT:g} s"
        said = f"no answer from {where} {within}: a firewall drops packets, or the address is no host's"
        mend = f"let TCP through to port {there[1]}, and between all hosts to the ports of ip_local_port_range"
    except socket.gaierror as error:
        said, mend = f"the name {there[0]} is not known here: {error.strerror}", "mend the name, or use an address"
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            said, mend = f"nothing listens at {where}", "start it there, and compare host and port"
        else:
            said, mend = f"{where} cannot be reached: {error}", f"look at the way to it: ip route get {there[0]}"
    return Finding(name, "wrong", said, mend)


def _close(found: tuple[socket.socket, float], name: str, where: str) -> Finding:
    sock, took = found
    sock.close()
    return Finding(name, "ok", f"{where} answers in {1e3 * took:.1f} ms and holds this token")


def _measure(sock: socket.socket) -> float:
    """Bytes a second. Raises `OSError`."""
    data = bytes(1 << 20)
    sock.settimeout(5 * LONGEST)
    begun = time.monotonic()
    for _ in range(DATA // len(data)):
        sock.sendall(data)
        if time.monotonic() - begun > LONGEST:
            break
    sock.shutdown(socket.SHUT_WR)
    received = int.from_bytes(sock.recv(8, socket.MSG_WAITALL), "big")
    return received / (time.monotonic() - begun)
