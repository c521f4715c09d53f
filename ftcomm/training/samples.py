"""Compares samples of the state once a joiner has caught up, before it contributes.

The joiner has a copy of the state, and has repeated the updates since (`ftcomm.training.replay`). A script that does
something else while it is behind would leave it with other weights for good, and nothing would say so. So at each
boundary at which another replica is behind, those that contribute take a sample: digests of the settings of each
optimizer and scheduler, with a few bytes of each tensor that it keeps or updates. The joiner asks one of them.

    joiner                                source
      |  dial(purpose="sample", {step})    |
      |----------------------------------->|
      |            Wait, once a second,    |   until it has passed the boundary of `step` itself
      |<-----------------------------------|
      |  SampleDigests(digests)                  |   or Refusal(reason)
      |<-----------------------------------|

An update that is missing, or one too many, changes nearly every element, so a few of each tensor tell. A single element
that was changed otherwise is not found: `ftcomm.verify` compares all.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ftcomm.control import handshake
from ftcomm.control.dropped import drop
from ftcomm.control.sealed import Connection
from ftcomm.control.views import View
from ftcomm.errors import StateError, TransportError
from ftcomm.training.block_scheduler import sources_of
from ftcomm.training.catchup_protocol import NoSource, Refusal, SampleDigests, Wait, Wrong, receive, send
from ftcomm.training.kinds import is_average, is_optimizer, is_scheduler
from ftcomm.training.state import Stateful, sampled

if TYPE_CHECKING:
    from ftcomm.group import Group

log = logging.getLogger("ftcomm")

PURPOSE = "sample"
KEPT = 4  # boundaries whose samples are kept: a source is at most one step ahead of a joiner
LONGEST = 1 << 20  # bytes of an answer
_WAIT = 1.0  # s between two signs of life of a source that waits


def take(state: Mapping[str, Stateful]) -> dict[str, bytes]:
    """Returns the digest of a sample of each optimizer, scheduler and average of weights in `state`. Copies from the
    device, and blocks for that."""
    found: dict[str, bytes] = {}
    for name, each in state.items():
        if is_optimizer(each):
            params = [param for group in each.param_groups for param in group["params"]]
            found[name] = sampled([each.state_dict(), params], name)
        elif is_scheduler(each):
            found[name] = sampled(each.state_dict(), name)
        elif is_average(each):  # its buffers may be those of one replica
            found[name] = sampled([each.n_averaged, list(each.parameters())], name)
    return found


class SampleSource:
    """The side that contributes. The step loop calls `at_boundary`; questions are answered in threads of their own."""

    def __init__(self, group: Group, state: Mapping[str, Stateful]) -> None:
        self._group, self._state = group, state
        self._moved = threading.Condition()
        self._kept: dict[int, dict[str, bytes]] = {}  # by boundary
        self._step = -1
        group.internals.serve(PURPOSE, self._serve)

    def at_boundary(self, step: int, view: View) -> None:
        """Take a sample, if another replica is behind, and this one is not."""
        counts = {member.replica: member.contributing for member in view.members}
        found = self._take() if counts.get(self._group.replica) and not all(counts.values()) else None
        with self._moved:
            self._step = step
            if found is not None:
                self._kept[step] = found
                for old in sorted(self._kept)[:-KEPT]:
                    del self._kept[old]
            self._moved.notify_all()

    def _take(self) -> dict[str, bytes] | None:
        try:
            return take(self._state)
        except Exception as error:  # a healthy replica must not end by it
            log.warning(
                "replica %d rank %d: a replica that catches up is not compared with it (%s: %s)",
                *(self._group.replica, self._group.shard, type(error).__name__, error),
            )
            return None

    def _serve(self, sock: Connection, fields: Mapping[str, Any]) -> None:
        step = handshake.number(fields, "step", most=1 << 53)
        with contextlib.closing(sock), contextlib.suppress(OSError):
            sock.settimeout(self._group.settings.timeouts.give_up)
            while True:
                with self._moved:
                    if self._step >= step or self._moved.wait_for(lambda: self._step >= step, timeout=_WAIT):
                        found = self._kept.get(step)
                        break
                send(sock, Wait())
            send(sock, Refusal(f"it has no sample of boundary {step}") if found is None else SampleDigests(found))


def compare(group: Group, state: Mapping[str, Stateful], step: int, view: View) -> None:
    """Raise `StateError` if what this replica holds at the boundary of `step` is not what a contributing one holds.

    Asks one after the other until one answers, each for half the time in which this replica would be called a stall.
    Logs if nobody does.
    """
    mine, whom = take(state), sources_of(view)
    for source in whom if mine else ():
        try:
            theirs = _ask(group, source, step)
        except (OSError, TransportError, NoSource) as error:
            log.info("replica %d rank %d: no sample of replica %d: %s", group.replica, group.shard, source, error)
            continue
        except (Wrong, msgspec.DecodeError) as error:
            drop("state", f"replica {source} as a source of a sample: {error}")
            continue
        wrong = [name for name, digest in mine.items() if theirs.get(name) != digest]
        if wrong:
            raise StateError(
                f"replica {group.replica} rank {group.shard}: boundary {step}: it has caught up, but its "
                f"{' and '.join(map(repr, wrong))} differ from what replica {source} has. So the script has done "
                "something else here than there since this replica came in, such as a step of an optimizer or a change "
                "of parameters that depends on them. It was stopped before it contributed; started again, it takes all "
                "of the state anew. FTCOMM_START=trust leaves this check out."
            )
        return
    if mine:
        log.warning("replica %d rank %d: no replica could confirm its state", group.replica, group.shard)


def _patience(group: Group) -> float:
    return group.settings.timeouts.op_floor / 2


def _ask(group: Group, source: int, step: int) -> dict[str, bytes]:
    patience = _patience(group)
    deadline = time.monotonic() + patience
    with contextlib.closing(group.internals.dial(source, PURPOSE, {"step": step})) as sock:
        sock.settimeout(patience)
        while isinstance(frame := receive(sock, LONGEST), Wait):
            if time.monotonic() > deadline:
                raise NoSource(f"it has not come to boundary {step} within {patience:.0f} s")
    if isinstance(frame, Refusal):
        raise NoSource(frame.reason)
    if not isinstance(frame, SampleDigests):
        raise Wrong(f"it answered {type(frame).__name__}, expected SampleDigests")
    return frame.digests
