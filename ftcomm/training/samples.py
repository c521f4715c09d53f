"""Takes what cannot be replayed, and compares a sample of the state, before a joiner contributes.

The joiner has caught up: it has a copy of the state, and has repeated the updates since (`ftcomm.training.replay`). Two
things are left:

    what no optimizer updates    as buffers, was changed since by the forward passes, on weights that the joiner did not
                                 have. It takes it as it is now (`ftcomm.training.untrained`), and with it
                                 the buffers that are not persistent, as far as training has changed them there
    a script that does something else while it is behind, which would leave it with other weights for good, and
                                 nothing would say so. It compares digests: of the settings of each optimizer and
                                 scheduler, with a few bytes of each tensor that it keeps or updates, and of all bytes
                                 of what no optimizer updates

So at each boundary at which another replica is behind, those that contribute take a sample. The joiner asks one of
them; after its last step all, so that each knows that it need not wait.

    joiner                                source
      |  dial(purpose="sample", {step, replica})
      |----------------------------------->|
      |            Wait, once a second,    |   until it has passed the boundary of `step` itself
      |<-----------------------------------|
      |  SampleOffer(digests, skeleton)    |   or Refusal(reason)
      |<-----------------------------------|
      |  Want(0)                           |   the bytes of its tensors
      |----------------------------------->|
      |  the bytes                         |
      |<-----------------------------------|
      |  CatchUpDone                       |   in any case
      |----------------------------------->|

An update that is missing, or one too many, changes nearly every element, so a few of each tensor tell. A single element
that was changed otherwise is not found: `ftcomm.verify` compares all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ftcomm.control import handshake
from ftcomm.control.dropped import drop
from ftcomm.control.rank_name import rank_name
from ftcomm.control.sealed import Connection
from ftcomm.control.views import View
from ftcomm.errors import StateError, TransportError
from ftcomm.training.block_scheduler import sources_of
from ftcomm.training.catchup_protocol import (
    MAX_REQUEST,
    BadFrame,
    CatchUpDone,
    CatchUpFrame,
    NoSource,
    Refusal,
    SampleOffer,
    Wait,
    Want,
    read_into,
    receive,
    send,
)
from ftcomm.training.kinds import is_average, is_optimizer, is_scheduler
from ftcomm.training.state import FlatState, Stateful, allocate, first_difference, flatten, load, sampled
from ftcomm.training.unsaved import UnsavedBuffers
from ftcomm.training.untrained import ChangeWatch, Sums, sums, untrained

if TYPE_CHECKING:
    from ftcomm.groups.group import Group

log = logging.getLogger("ftcomm")

PURPOSE = "sample"
KEPT = 4  # boundaries whose samples are kept: a source is at most one step ahead of a joiner
_WAIT = 1.0  # s between two signs of life of a source that waits


def digests(state: Mapping[str, Stateful], of_rest: Sums) -> dict[str, bytes]:
    """Returns the digest of a sample of each optimizer, scheduler and average of weights in `state`, and of what no
    optimizer updates in each module, whose sums `of_rest` has. Copies from the device, and blocks for that."""
    found: dict[str, bytes] = {}
    for name, each in state.items():
        if is_optimizer(each):
            params = [param for group in each.param_groups for param in group["params"]]
            found[name] = sampled([each.state_dict(), params], name)
        elif is_scheduler(each):
            found[name] = sampled(each.state_dict(), name)
        elif is_average(each):
            found[name] = sampled([each.n_averaged, list(each.parameters()), of_rest.get(name)], name)
        elif name in of_rest:
            found[name] = sampled(of_rest[name], name)
    return found


@dataclasses.dataclass(frozen=True)
class _Taken:
    """A sample of the state at one boundary, and what cannot be replayed as it was there."""

    digests: dict[str, bytes]
    rest: FlatState


class SampleSource:
    """The side that contributes. The step loop calls `at_boundary`; questions are answered in threads of their own."""

    def __init__(self, group: Group, state: Mapping[str, Stateful]) -> None:
        self._group, self._state = group, state
        self._watch = ChangeWatch(state)
        self._moved = threading.Condition()
        self._kept: dict[int, _Taken] = {}  # by boundary
        self._step = -1
        self._behind: frozenset[int] = frozenset()  # replicas that may ask here about the last boundary
        self._asking: set[int] = set()
        self._answered: set[int] = set()
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
            asks = found is not None and self._group.replica in sources_of(view)
            self._behind = frozenset(replica for replica, here in counts.items() if asks and not here)
            self._answered.clear()
            self._moved.notify_all()

    def linger(self) -> None:
        """Stay after the last step until those that are behind have asked, or have left. Who does not ask is waited for
        no longer than half the time in which the others would call this replica a stall."""
        begun = time.monotonic()
        with self._moved:
            while left := (self._behind - self._answered) & frozenset(self._group.members):
                if time.monotonic() > begun + _timeout(self._group) and not left & self._asking:
                    return
                self._moved.wait(0.05)  # a loss is not announced here, so look

    def _take(self) -> _Taken | None:
        try:
            of_rest, rest = self._watch.look()
            return _Taken(digests(self._state, of_rest), rest)
        except Exception as error:  # a healthy replica must not end by it
            log.warning(
                "%s: a replica that catches up has no sample from here (%s: %s)",
                *(rank_name(self._group.replica, self._group.shard), type(error).__name__, error),
            )
            return None

    def _serve(self, sock: Connection, fields: Mapping[str, Any]) -> None:
        step = handshake.number(fields, "step", most=1 << 53)
        joiner = handshake.number(fields, "replica")
        with contextlib.closing(sock), self._talking(joiner, step), contextlib.suppress(OSError):
            sock.settimeout(self._group.settings.timeouts.give_up)
            try:
                self._answer(sock, step)
            except (msgspec.DecodeError, BadFrame) as error:
                drop("state", f"the connection of replica {joiner}, which asks for a sample: {error}")

    @contextlib.contextmanager
    def _talking(self, joiner: int, step: int) -> Iterator[None]:
        """A context in which a joiner asks about the boundary of `step`."""
        with self._moved:
            self._asking.add(joiner)
        try:
            yield
        finally:
            with self._moved:
                self._asking.discard(joiner)
                if step == self._step:
                    self._answered.add(joiner)
                self._moved.notify_all()

    def _answer(self, sock: Connection, step: int) -> None:
        while True:
            with self._moved:
                if self._step >= step or self._moved.wait_for(lambda: self._step >= step, timeout=_WAIT):
                    found = self._kept.get(step)
                    break
            send(sock, Wait())
        if found is None:
            send(sock, Refusal(f"it has no sample of boundary {step}"))
            return
        send(sock, SampleOffer(found.digests, found.rest.skeleton))
        want = receive(sock, MAX_REQUEST)
        if want == Want(0):
            for view in found.rest.views():
                sock.sendall(view)
            want = receive(sock, MAX_REQUEST)
        if not isinstance(want, CatchUpDone):
            raise BadFrame(f"it sent {want!r}, expected Want(0) or CatchUpDone")


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer that a joiner got, and from whom."""

    source: int
    taken: _Taken


def ask(
    group: Group,
    state: Mapping[str, Stateful],
    step: int,
    view: View,
    *,
    unsaved: UnsavedBuffers,
    all_of_them: bool = False,
) -> Answer | None:
    """Returns the sample of one that contributes of the boundary of `step`; None if nobody has answered.

    Asks one after the other until one answers, each for half the time in which this replica would be called a stall.
    With `all_of_them` the others are asked too, so that they need not `linger`. Raises `StateError` if what nobody can
    replay is in the `state`, or in the `unsaved` buffers of this replica, and none gives it.
    """
    here = flatten(untrained(state)).skeleton
    found = None
    for source in sources_of(view):
        try:
            taken = _ask(group, source, step, here, wants=found is None)
        except (OSError, TransportError, NoSource) as error:
            log.info("%s: no sample of replica %d: %s", rank_name(group.replica, group.shard), source, error)
            continue
        except (BadFrame, msgspec.DecodeError) as error:
            drop("state", f"replica {source} as a source of a sample: {error}")
            continue
        found = Answer(source, taken) if found is None else found
        if not all_of_them:
            break
    if found is None and (any(part.state_dict() for part in untrained(state).values()) or unsaved.changed()):
        raise StateError(
            f"{rank_name(group.replica, group.shard)}: boundary {step}: no replica could give it the buffers and "
            "frozen parameters as they are now, which it cannot replay. Start this replica again: it takes all of the "
            "state anew."
        )
    return found


def settle(group: Group, state: Mapping[str, Stateful], step: int, answer: Answer | None, *, compares: bool) -> None:
    """Take over what cannot be replayed. If it `compares`, raise `StateError` if what this replica holds is then not
    what the one that answered holds; log if nobody has."""
    if answer is None:
        if compares and digests(state, {}):
            log.warning("%s: no replica could confirm its state", rank_name(group.replica, group.shard))
        return
    load(answer.taken.rest, untrained(state))
    if not compares:
        return
    mine, theirs = digests(state, sums(state)), answer.taken.digests
    if wrong := [name for name, digest in mine.items() if theirs.get(name) != digest]:
        raise StateError(
            f"{rank_name(group.replica, group.shard)}: boundary {step}: it has caught up, but its "
            f"{' and '.join(map(repr, wrong))} differ from what replica {answer.source} has. So the script has done "
            "something else here than there since this replica came in, such as a step of an optimizer or a change "
            "of parameters that depends on them. It was stopped before it contributed; started again, it takes all "
            "of the state anew. FTCOMM_START=trust leaves this check out."
        )


def _timeout(group: Group) -> float:
    return group.settings.timeouts.op_floor / 2


def _ask(group: Group, source: int, step: int, here: bytes, *, wants: bool) -> _Taken:
    """Returns the sample of one source, without its tensors unless it `wants` them. `here` is the skeleton of what no
    optimizer updates, of this replica."""
    timeout = _timeout(group)
    deadline = time.monotonic() + timeout
    with contextlib.closing(group.internals.dial(source, PURPOSE, {"step": step, "replica": group.replica})) as sock:
        sock.settimeout(timeout)
        while isinstance(frame := receive(sock), Wait):
            if time.monotonic() > deadline:
                raise NoSource(f"it has not come to boundary {step} within {timeout:.0f} s")
        sample = _sampled(frame)
        rest = FlatState(sample.skeleton, [])
        if wants:
            if difference := first_difference(here, sample.skeleton):
                raise StateError(
                    f"{rank_name(group.replica, group.shard)}: boundary {step}: the buffers and frozen parameters "
                    f"of replica {source} do not fit here: {difference}. Make the same modules on all replicas."
                )
            rest = allocate(sample.skeleton)
            send(sock, Want(0))
            for view in rest.views():
                read_into(sock, view)
        send(sock, CatchUpDone())
    return _Taken(sample.digests, rest)


def _sampled(frame: CatchUpFrame) -> SampleOffer:
    if isinstance(frame, Refusal):
        raise NoSource(frame.reason)
    if not isinstance(frame, SampleOffer):
        raise BadFrame(f"it answered {type(frame).__name__}, expected SampleOffer")
    return frame
