"""The witness of a rank: a process beside it that tells the leader when the rank has ended. A rank has one if its
leader does not see its process.

A killed process says nothing. Its host then refuses connections, but a firewall in between would do so too, so that
proves nothing. Where the leader sees the same processes, the kernel tells it; elsewhere the witness asks the kernel
that does, and proves by the job's token that it belongs to the job. So the end of a rank is known at once, whether or
not another process of the job is left on its host. If host and witness go with the rank, there is silence, as without
one. A rank that ends as it should tells that by itself.

It is a companion of the rank (`ftcomm.control.companion`). It holds none of the rank's output, at whose end a reader
may wait for the rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec

from ftcomm.control import handshake, wire
from ftcomm.control.companion import Companion, become_companion, begin, dismissed
from ftcomm.control.running_time import RunningTimer
from ftcomm.control.tls import Files, Tls

PURPOSE = "witness"
_MARK = "FTCOMM_RUN"  # a launcher finds by it what a dead rank has left behind
_PAUSE = 0.1  # s between two calls of a process that does not answer


class WitnessConfig(msgspec.Struct, frozen=True):
    """All that a witness has to know."""

    nonce: str  # the nonce in the address of the rank
    shard: int
    leader: tuple[str, int]
    token: str
    job: str
    tls: Files | None
    call_timeout: float  # s for which the witness calls the leader


_CONFIG = msgspec.json.Decoder(WitnessConfig)


class Witness(Companion):
    """The rank's end of the connection to its witness."""

    def __init__(self, config: WitnessConfig) -> None:
        """Starts the witness. Raises `OSError`."""
        environment = {name: value for name, value in os.environ.items() if name not in (_MARK, "FTCOMM_TOKEN")}
        end = os.pidfd_open(os.getpid())
        try:
            super().__init__(__name__, msgspec.json.encode(config), (end,), environment)
        finally:
            os.close(end)


def main() -> None:
    sock, data, (end,) = become_companion()
    config = _CONFIG.decode(data)
    credentials = handshake.Credentials(config.token, config.job, None if config.tls is None else Tls(config.tls))
    begin(sock)
    if not dismissed(sock, end):
        tell(config, credentials)


def tell(config: WitnessConfig, credentials: handshake.Credentials) -> None:
    """Call the leader until it hears, or for as long as `config` says."""
    fields: handshake.Fields = {"shard": config.shard, "nonce": config.nonce}
    call([config.leader], credentials, PURPOSE, fields, config.call_timeout)


def call(
    those: Sequence[tuple[str, int]],
    credentials: handshake.Credentials,
    purpose: str,
    fields: handshake.Fields,
    seconds: float,
) -> None:
    """Call processes in turn until one hears, for so many seconds at most. One that refuses is called no more."""
    left = list(those)
    timer = RunningTimer(seconds, time.monotonic, most=wire.KERNEL)  # it may be stopped, or all may
    while left and timer.left():
        there = left.pop(0)
        try:
            wire.connect(there, credentials, purpose, fields, wire.KERNEL, process=timer).close()
            return
        except handshake.Refused:
            pass
        except OSError:
            left.append(there)
            time.sleep(_PAUSE)


if __name__ == "__main__":
    main()
