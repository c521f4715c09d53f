"""A process has enough descriptors for all its connections, or says so before it makes the first of them."""

from __future__ import annotations

import os
import resource

from ftcomm.errors import TransportError

PEER = 3  # descriptors for a peer that is reached by TCP: a link, and a connection each way
RESERVE = 32  # for whatever else a process opens meanwhile


def room_for(peers: int, what: str, others: int = 0) -> None:
    """Raise the soft limit to the hard one if `peers` more need it, and `others` descriptors. Raises `TransportError`
    if that is not enough."""
    needed = len(os.listdir("/proc/self/fd")) + PEER * peers + others + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise TransportError(
            f"{what} needs up to {needed} open files, and this process may have {hard}; raise the limit (ulimit -n "
            f"{needed}; LimitNOFILE of systemd, --ulimit nofile of a container)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
