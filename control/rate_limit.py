"""Limits the rate of handshakes from each source, so that a flood costs little and keeps no other source out. Pure: it
is told of connections and of the time.

Each source has a token bucket (its tokens have nothing to do with the job's token). A connection takes one, and puts it
back once it has proved to hold the job's token, so a job whose ranks all start at once from one host is not held up.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress

RATE = 200.0  # connections a second that a source may leave unproved
BURST = 512.0  # and so many more after a pause
SOURCES = 4096  # that have a bucket; the one that came longest ago loses it


@dataclasses.dataclass
class _TokenBucket:
    level: float
    since: float  # when the level was right


class HandshakeRateLimit:
    """The token buckets of all sources. `now` is in seconds and never goes back."""

    def __init__(self) -> None:
        self._buckets: dict[str, _TokenBucket] = {}  # the newest source is last

    def admit(self, source: str, now: float) -> bool:
        """Whether a new connection from `source` may go on; otherwise close it unread."""
        bucket = self._buckets.pop(source, None) or _TokenBucket(BURST, now)
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
        """Note that an admitted connection has proved to hold the job's token."""
        bucket = self._buckets.get(source)
        if bucket is not None:
            bucket.level = min(BURST, bucket.level + 1.0)


@functools.lru_cache(SOURCES)  # thousands of connections come from one address
def source_of(address: str) -> str:
    """Returns the source of an address: itself for IPv4, its network of 64 bits for IPv6, as one host may have it."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv6Address):
        return str(known.ipv4_mapped or int(known) >> 64)
    return str(known)
