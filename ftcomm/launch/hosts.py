"""Hosts of their own for the replicas of a job. The launcher asks for them by these interfaces; `ftcomm.lab.netns` has
some that are network namespaces of this machine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

HUB = -1  # the place of the coordinator; the others are numbers of hosts


class HostNetwork(Protocol):
    """The hosts of one job while it runs."""

    def address(self, place: int) -> str:
        """Returns the IP address of a place."""

    def path(self, place: int) -> str:
        """Returns the file of the network namespace of a place, as other processes of this user open it; "" for one
        that takes no faults by the kernel's tables."""

    def inside(self, place: int) -> AbstractContextManager[None]:
        """Sockets that this thread makes, and processes that it starts, are at `place`."""

    def close(self) -> None:
        """Take the network away. Idempotent."""


class HostPlacement(Protocol):
    """Says on which host each replica runs, and makes the hosts."""

    def check(self, replicas: int) -> None:
        """Raise `SettingsError`, with the mend, if so many replicas cannot be placed."""

    def place(self, replica: int) -> int: ...

    def open(self, replicas: int) -> HostNetwork:
        """Make the hosts. May block for seconds. Raises `SettingsError` if this user or kernel cannot do it."""
