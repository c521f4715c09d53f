"""Finds the address by which the others reach this host, and a port to listen on there.

FTCOMM_HOST gives it: an address, a name, or an interface ("ib0"). Without it the address is the one from which packets
to the coordinator leave, since the others are where the coordinator is, or beyond.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import resource
import socket
import struct
import time

from ftcomm.control.links import listen
from ftcomm.control.wire import no_ports
from ftcomm.errors import InitError, SettingsError

SIOCGIFADDR, SIOCGIFMTU = 0x8915, 0x8921  # <linux/sockios.h>
PAUSE = 0.5  # s between two look-ups of a name that is not known yet


def interfaces() -> dict[str, str]:
    """Returns name -> IPv4 address, for the interfaces that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("16s24x", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def mtu(name: str) -> int:
    """Returns the MTU of an interface, in bytes. Raises `OSError`. (/sys would tell the MTU in the network namespace in
    which it was mounted.)"""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, SIOCGIFMTU, struct.pack("16s24x", name.encode()))
        return int(struct.unpack_from("16xi", answer)[0])


def listed() -> str:
    """Lists the interfaces for an error message."""
    return ", ".join(f"{name} {address}" for name, address in interfaces().items())


def look_up(host: str, port: int | None, kind: socket.SocketKind) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Looks a name up: its family and address. Raises `OSError`; `InitError` if Python cannot load what it needs for
    names."""
    try:
        family, _, _, _, (address, found, *_) = socket.getaddrinfo(host, port, type=kind)[0]
        return family, (str(address), int(found))
    except (LookupError, MemoryError) as error:  # the codec of names is loaded here for the first time
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        bound = f"{limit >> 20} MB (RLIMIT_AS)" if limit != resource.RLIM_INFINITY else "not limited (RLIMIT_AS)"
        raise InitError(
            f"the name {host!r} cannot be looked up, since Python could not load its codec ({error}). That is what a "
            f"process without address space says first; it is {bound} here. Raise it (ulimit -v), or free memory "
            "before ftcomm.init()."
        ) from error


def source(towards: tuple[str, int]) -> tuple[str, str]:
    """Returns the address from which packets to `towards` leave, and the address of `towards`. Sends nothing. Raises
    `OSError`."""
    family, address = look_up(*towards, socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(address)
        return str(way.getsockname()[0]), address[0]


def own_address(asked: str, towards: tuple[str, int], name: str, timeout: float = 0.0) -> str:
    """Returns the address for FTCOMM_HOST=`asked` ("" if it is not set); `towards` is the value of the variable `name`.

    Blocks for at most `timeout` seconds while the name in `towards` is not known yet, such as that of a pod that
    starts. Raises `SettingsError` on an address that others cannot reach.
    """
    if asked and not is_loopback(asked):
        return resolved(asked)
    deadline = time.monotonic() + timeout
    while True:
        try:
            from_here, there = source(towards)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise SettingsError(
                    f"{name}={towards[0]}:{towards[1]}: there is no way to it from this host, which has {listed()} "
                    f"({error.strerror or error}). Mend the name or the network."
                ) from None
        time.sleep(PAUSE)
    if asked and from_here != there and not is_loopback(from_here):
        raise SettingsError(
            f"FTCOMM_HOST={asked} is reached from this host alone, and {name}={towards[0]}:{towards[1]} is on another "
            f"one; the way there leaves from {from_here}. Unset FTCOMM_HOST, or set it to an address or an interface "
            f"that the others reach; this host has {listed()}."
        )
    return asked or from_here


def open_port(host: str) -> socket.socket:
    """Returns a listening socket at a free port of `host`, the result of `own_address`. Raises `InitError`."""
    try:
        return listen(host, 0)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InitError(f"cannot listen on {host}: {no_ports()}.") from None
        raise InitError(
            f"cannot listen on FTCOMM_HOST={host}: {error.strerror or error}; set it to an address of this host, which "
            f"has {listed()}, or unset it."
        ) from None


def resolved(asked: str) -> str:
    """Returns the address of an interface or a name; an address stays as it is. Raises `SettingsError`."""
    here = interfaces()
    if asked in here:
        return here[asked]
    if asked in (name for _, name in socket.if_nameindex()):
        raise SettingsError(f"FTCOMM_HOST={asked}: this interface has no IPv4 address; this host has {listed()}.")
    try:
        return look_up(asked, None, socket.SOCK_STREAM)[1][0]
    except OSError as error:
        raise SettingsError(
            f"FTCOMM_HOST={asked} is neither an address nor an interface of this host, which has {listed()} ({error})."
        ) from None


def is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
