"""A bucket for each source decides who may begin a handshake now: a flood costs little and keeps nobody else out.

Each is a token bucket, whose tokens are not the job's. Pure: told of connections and of the time. What a source pays
for a connection it gets back when that has proved to hold the job's token, so a job that starts at once from one host
is not held up.
"""

from __future__ import annotations

import dataclasses
import ipaddress

RATE = 200.0  # connections a second that a source may leave without a proof
BURST = 512.0  # on top of these, after a pause
SOURCES = 4096  # that are remembered


@dataclasses.dataclass
class _Bucket:
    level: float
    since: float  # when it was that


class Crowd:
    """The buckets of all sources. `now` is in seconds and never goes back."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}  # of sources that are not full, who came last at the end

    def admit(self, source: str, now: float) -> bool:
        """Whether a new connection from `source` may go on; else it is to be closed unread."""
        bucket = self._buckets.pop(source, None) or _Bucket(BURST, now)
        bucket.level = min(BURST, bucket.level + RATE * (now - bucket.since))
        bucket.since = now
        self._buckets[source] = bucket
        if len(self._buckets) > SOURCES:
            del self._buckets[next(iter(self._buckets))]
        if bucket.level < 1.0:
            return False
        bucket.level -= 1.0
        return True

    def proved(self, source: str) -> None:
        """A connection that was admitted has proved to hold the job's token."""
        bucket = self._buckets.get(source)
        if bucket is not None:
            bucket.level = min(BURST, bucket.level + 1.0)


def source_of(address: str) -> str:
    """What counts as one source: an address of IPv4, or a network of 64 bits of IPv6, as one host may have it."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv6Address):
        return str(known.ipv4_mapped or int(known) >> 64)
    return str(known)
