"""Hosts of their own for replicas on one machine: `ftcomm run --hosts netns`.

                    hub: bridge 10.77.0.1, the coordinator listens here
                   /           |            \\
            r0 (veth)      r1 (veth)      r2 (veth)
               |               |              |
    replica 0: 10.77.1.1   10.77.1.2      10.77.1.3        eth0 of a network namespace each

Namespaces have no names: file descriptors of the launcher and the processes in them hold them, so however a launcher
ends, the kernel takes them away with the last of its processes, bridge and cables included. All but the network is
shared: a replica can still reach the memory of another, unless the transport is tcp. There is no way out to other
networks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ftcomm.errors import SettingsError
from ftcomm.launch.hosts import HUB

CLONE_NEWNET = 0x40000000  # <sched.h>; os.setns came with Python 3.12
BRIDGE, CABLE = "hub", "eth0"  # the bridge, and the end of the cable in a replica's namespace
HUB_ADDRESS = "10.77.0.1"
PREFIX = 16


def address(replica: int) -> str:
    return f"10.77.{1 + replica // 250}.{1 + replica % 250}"


def port(replica: int) -> str:
    """The end of its cable at the hub."""
    return f"r{replica}"


class LabNetwork:
    """A hub and `replicas` hosts. `hub` and `hosts` are descriptors of their namespaces."""

    def __init__(self, replicas: int) -> None:
        """Takes some 20 ms a host. Raises `SettingsError` if this user or kernel cannot do it."""
        _import_pyroute2()
        self.hub = -1
        self.hosts: list[int] = []
        try:
            self.hub = _new_namespace()
            for _ in range(replicas):
                self.hosts.append(_new_namespace())
            _in_thread(self._lay_cables)
        except BaseException as error:
            self.close()
            if isinstance(error, PermissionError):
                raise SettingsError(
                    "--hosts netns: only root can make network namespaces; use sudo, or leave the option away"
                ) from None
            raise

    def address(self, place: int) -> str:
        return HUB_ADDRESS if place == HUB else address(place)

    def path(self, place: int) -> str:
        """Returns where another process of this user can open the namespace of `place`."""
        return f"/proc/{os.getpid()}/fd/{self.hub if place == HUB else self.hosts[place]}"

    @contextlib.contextmanager
    def inside(self, place: int) -> Iterator[None]:
        with inside(self.hub if place == HUB else self.hosts[place]):
            yield

    def close(self) -> None:
        """The namespaces go when the last process in them does. Idempotent."""
        for fd in (self.hub, *self.hosts):
            if fd >= 0:
                os.close(fd)
        self.hub, self.hosts = -1, []

    def _lay_cables(self) -> None:
        with inside(self.hub), netlink() as ip:
            _up(ip, "lo")
            ip.link("add", ifname=BRIDGE, kind="bridge")
            bridge = index(ip, BRIDGE)
            ip.addr("add", index=bridge, address=HUB_ADDRESS, prefixlen=PREFIX)
            ip.link("set", index=bridge, state="up")
            for replica, host in enumerate(self.hosts):
                ip.link("add", ifname=port(replica), kind="veth", peer={"ifname": CABLE, "net_ns_fd": host})
                ip.link("set", index=index(ip, port(replica)), master=bridge, state="up")
        for replica, host in enumerate(self.hosts):
            with inside(host), netlink() as ip:
                _up(ip, "lo")
                ip.addr("add", index=index(ip, CABLE), address=address(replica), prefixlen=PREFIX)
                _up(ip, CABLE)


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """Sockets that this thread makes, and processes that it starts, are in `namespace`. Raises `PermissionError`."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        call("setns", namespace, CLONE_NEWNET)
        try:
            yield
        finally:
            call("setns", home, CLONE_NEWNET)
    finally:
        os.close(home)


def netlink() -> Any:
    """A `pyroute2.IPRoute` of the namespace that this thread is in. Not in a thread that runs an event loop."""
    return _import_pyroute2().IPRoute()


def index(ip: Any, name: str) -> int:
    found: int = ip.link_lookup(ifname=name)[0]
    return found


def _up(ip: Any, name: str) -> None:
    ip.link("set", index=index(ip, name), state="up")


def _new_namespace() -> int:
    made: list[int] = []

    def make() -> None:
        call("unshare", CLONE_NEWNET)
        made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    _in_thread(make)
    return made[0]


def _in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a thread of its own, whose namespace matters to nothing else; raises what `work` does."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="ftcomm-network")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def call(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))  # PermissionError, say


def _import_pyroute2() -> Any:
    try:
        import pyroute2  # type: ignore[import-untyped]
    except ImportError:
        raise SettingsError("--hosts netns needs pyroute2; install it with: pip install 'ftcomm[chaos]'") from None
    return pyroute2
