"""A process has enough descriptors for all its connections, or says so before it makes the first of them."""

from __future__ import annotations

import os
import resource

from ftcomm.errors import TransportError

JOB_PEER = 4  # descriptors for a peer that is reached by TCP: a link and a connection for data, each way
STATIC_PEER = 3  # the same in a static group, where two members have one link
RESERVE = 32  # for whatever else a process opens meanwhile


def room_for(more: int, what: str) -> None:
    """Raise the soft limit to the hard one if so many `more` descriptors need it. Raises `TransportError` if that is
    not enough."""
    needed = len(os.listdir("/proc/self/fd")) + more + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise TransportError(
            f"{what} needs up to {needed} open files, and this process may have {hard}; raise the limit (ulimit -n "
            f"{needed}; LimitNOFILE of systemd, --ulimit nofile of a container)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
