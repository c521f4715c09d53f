"""Says which ranks of a replica have a host agent between themselves and the leader."""

from __future__ import annotations


def agent_ranks(shard: int, host_ranks: int, ranks: int) -> range:
    """Returns the ranks that share a host agent with `shard`, of a replica of `ranks` ranks with `host_ranks` on each
    host (0: nobody has said); empty if there is none. The first of them starts it.

    The ranks of the first host need none, since the leader runs there; a single rank needs none, and so no replica that
    has one host, or one process.
    """
    if host_ranks < 2 or shard < host_ranks:
        return range(0)
    first = shard - shard % host_ranks
    there = range(first, min(first + host_ranks, ranks))
    return there if len(there) > 1 else range(0)
