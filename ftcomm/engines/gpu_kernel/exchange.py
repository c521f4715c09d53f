"""The exchange of a group at one member, where a kernel runs the ops. Where the host drives them, be it that a
device reduces: `ftcomm.collective.exchange`.

Ops are launched when they are submitted, and run in that order on the op stream of the device, each followed by a gate.
What a view change does to them:

    freeze    OPEN = 0: the launch that runs ends between two steps, one that comes later holds. Nothing of ours touches
              any memory when BEGUN == FINISHED
    progress  the op that has begun and not returned, and from the words of its lanes what of it is FINAL. Ops that were
              launched and have not begun count as not called: nobody can hold a chunk of them
    resume    own words are raised to the epoch, the table of members is written, OPEN = epoch; what is left of the op
              is launched on the repair stream. Its gate has held the op stream all the while

What is captured into a graph is launched when that is replayed: see `ftcomm.engines.gpu_kernel.graphs`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from ftcomm.collective.chunks import Contributors
from ftcomm.collective.inflight import Resumed
from ftcomm.collective.plan import GroupView
from ftcomm.collective.resume import ProtocolError
from ftcomm.collective.roster import pass_boundary
from ftcomm.collective.watchdog import Stall
from ftcomm.control.messages import Progress, Roster
from ftcomm.engines.gpu_kernel.copies import Copies
from ftcomm.engines.gpu_kernel.graphs import captured
from ftcomm.engines.gpu_kernel.launch import account
from ftcomm.engines.gpu_kernel.monitor import Monitor
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError
from ftcomm.kernels.device.words import (
    BASE_OF,
    CAPTURED,
    OK,
    OPEN,
    RETURNED,
    STARTED,
    TIMED_OUT,
)
from ftcomm.own import own_process
from ftcomm.transport.base import MirrorWriter, Peer

_MOMENT = 0.1  # s; between two looks whether a drain has to end


class DeviceExchange(Monitor):
    """The collectives of one member of a group. Frozen until the first `resume`; ops submitted before wait for it.

    Arguments and methods are those of `ftcomm.collective.exchange.Exchange`, but that peers are reached by shared
    memory alone, and results are not compared.
    """

    # -- the caller's side: any thread -------------------------------------------------------------------------------

    def submit(self, op: KernelOperation) -> None:
        """Enqueue and launch, or capture. Does not block. If the engine has failed, `op.error` is set at once.

        Raises what an earlier op failed with whose caller did not wait for it.
        """
        own_process()
        self._raise_unheard()
        if self._device.capturing():
            self._capture(op)
            return
        try:
            with self._launching:
                with self._mutex:
                    if self._error is not None:
                        op.finish(self._error)
                        return
                    if not self._flight.ops:
                        self._watch.began = time.monotonic()
                    self._flight.add(op)
                    op.template = self._called
                    self._called += 1
                    view = self._view
                    self._late = self._late or view is None
                    late = self._late
                    self._start_monitor()
                    self._changed.notify_all()
                if view is not None and not late:
                    self._device.follow()
                    self._launch(op, view)
        except ArgumentError:
            raise
        except BaseException as error:  # an interrupt: nobody knows whether it was launched
            self._fail(FtcommError(f"the engine was interrupted by {error!r}; this rank cannot go on"))
            raise

    def _capture(self, op: KernelOperation) -> None:
        with self._launching:
            with self._mutex:
                if self._error is not None:
                    op.finish(self._error)
                    return
                view = self._view
                if view is None:
                    raise FtcommError("an op cannot be captured before this member is in a view of the group")
                op.template = CAPTURED + len(self._captured)
                self._captured.append(op)
                self._start_monitor()
                self._changed.notify_all()
            self._device.follow()
            self._launch(op, view)

    def _raise_unheard(self) -> None:
        unheard, self._unheard = self._unheard, None
        if unheard is not None:
            raise unheard

    def run(self, op: KernelOperation) -> None:
        """Enqueue, and return when the caller may use the array, as the device understands that: when `op.done`, or
        when its current stream waits for the op, or when the graph does into which it is captured."""
        self.submit(op)
        self.wait(op)

    def wait(self, op: KernelOperation, timeout: float | None = None) -> bool:
        """Until the caller may use the array of `op`; False if `timeout` seconds pass before. Any thread."""
        if op.done:
            return True
        own_process()
        in_graph = captured(op.template)
        launched = self._launched.get(op.template)
        if launched is not None and launched.mark is not None and (not in_graph or self._device.capturing()):
            with self._mutex:
                self._trusted.add(op.template)
            self._device.release(launched.mark)
            return True
        return in_graph or op.wait(timeout)

    def drain(self, timeout: float | None = None) -> None:
        """Block until nothing is in flight, replays included. Raises `CollectiveTimeout` after `timeout` seconds, and
        what an earlier op failed with whose caller did not wait for it; not the errors of others."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        self._flight.drain(self._mutex, timeout)
        if self._captured:
            self._draining = True
            try:
                while not self._device.drain(min(_MOMENT, max(0.0, end - time.monotonic()))):
                    if time.monotonic() > end:
                        raise CollectiveTimeout(
                            f"a graph was still replaying op {self._ctl[RETURNED]} after {timeout:g}s"
                        )
            finally:
                self._draining = False
            with self._mutex:
                if self._error is None:
                    self._collect()
                    self._count()
            self._raise_unheard()

    @property
    def view(self) -> GroupView:
        """The last that was entered."""
        assert self._view is not None
        return self._view

    @property
    def give_up(self) -> float:
        """Seconds after which a wait for others is the end."""
        return self._watch.give_up

    def copy(self, roster: Sequence[int], body: Callable[[Copies], int]) -> int | None:
        """Run `body` on the copy engines among the members, if they are the `roster`. The epoch in which it has ended
        well; None if it was not begun, or was broken off with that epoch. Blocks. Raises the engine's error."""
        with self._mutex:
            if self._error is not None:
                raise self._error
            view = self._view
            if view is None or self._frozen or view.members != tuple(roster):
                return None
            if self._copying:
                raise FtcommError(
                    "another thread is copying; call allgather(copy_engine=True) from one thread at a time"
                )
            if self._copies is None or self._copies.epoch != view.epoch:
                me = view.members.index(self.replica)
                members = [self._reached.get(member, self._device.own) for member in view.members]
                stop = lambda: self._frozen or self._error is not None  # noqa: E731
                self._copies = self._device.copy_engines(me, members, view.epoch, stop)
            self._copying = True
            copies = self._copies
        try:
            status = body(copies)
        finally:
            with self._mutex:
                self._copying = False
                self._changed.notify_all()
            self.nudge()
        if status == TIMED_OUT:
            self._fail(
                CollectiveTimeout(f"allgather(copy_engine=True) waited {self.give_up:g} s; did all make the same call?")
            )
        return view.epoch if status == OK else None

    def common(self, *, reset: bool = False) -> Contributors | None:
        """After `drain`: whose input is in every chunk that was reduced since the last reset; None if nothing was."""
        flight = self._flight
        common, flight.common = flight.common, None if reset else flight.common
        return common

    @property
    def stood(self) -> float:
        """Seconds that ops have stood still here, waiting for members that did not move, or were lost."""
        return self._watch.stood

    def waiting(self, seconds: float) -> Stall | None:
        """On whom the op in flight waits, if it has made no progress for at least `seconds`. Disturbs nobody."""
        return None if self._frozen else self._watch.waiting(seconds)

    def roster(self, step: int) -> Roster:
        """That from the boundary of `step` on. After the first view."""
        with self._mutex:
            return self._rosters.at(step)

    def stand(self, step: int) -> None:
        """A joiner begins as if it had passed the boundary of `step`."""
        with self._mutex:
            self._rosters.stand(step)

    def pass_boundary(self, step: int, timeout: float) -> Roster:
        """See `ftcomm.collective.roster.pass_boundary`."""
        moves = lambda: not self._frozen or self._error is not None  # noqa: E731
        return pass_boundary(self._rosters, self._changed, moves, step, timeout)

    # -- the control side: none of these blocks ----------------------------------------------------------------------

    def freeze(self, quiesced: Callable[[], None]) -> None:
        """Stop; `quiesced` is called, here or by the monitor, when nothing of ours runs. May be repeated."""
        with self._mutex:
            if not self._frozen:
                self._since = time.monotonic()
            self._frozen = True
            self._repair = None  # its tasks are those of an epoch that is over
            if self._error is None:
                self._ctl[OPEN] = 0
            now = self._quiet()
            if not now:
                self._quiesced.append(quiesced)
                self._start_monitor()
                self._changed.notify_all()
        if now:
            quiesced()
        else:
            self.nudge()

    def nudge(self) -> None:
        """Let the monitor look at once."""
        self._nudged.set()

    def progress(self) -> Progress:
        """Where this member stands. Between `quiesced` and `resume`. Raises the engine's error if it has failed."""
        with self._mutex:
            if self._error is not None:
                raise self._error
            if self._view is None:
                return Progress(returned=0, ops=(), fresh=True)
            self._collect()
            op = self._number()
            if op is not None:
                self._hear()
                if op.error is None:
                    own = self._device.own.lanes
                    account(op, own, self._device.layout, self._view, self._ctl[BASE_OF])
            return self._rosters.told(self._flight.progress(self._ctl[STARTED]))

    def admit(self, writer: MirrorWriter) -> None:
        """Refuse a member that has found no other way than a connection: kernels read shared memory alone."""
        writer.close()

    def resume(self, view: GroupView, peers: Mapping[int, Peer], progress: Mapping[int, Progress]) -> Resumed:
        """Enter the epoch of `view`. `peers` are all its other members, `progress` is of all its members, this one too.

        A defect in the members' accounts of themselves fails the engine with `ProtocolError`.
        """
        with self._mutex:
            if not self._frozen or not self._quiet():
                raise RuntimeError("resume() before the engine has quiesced")
            if self._error is not None:
                return Resumed(0, 0, 0)
            self._replace(peers)
            begun = self._number()
            ops = tuple(self._flight.ops)
            if self._view is None:
                self._flight.number_from(progress)
            resumed = Resumed(0, 0, 0)
            failed: BaseException | None = None
            try:
                resumed = self._flight.resume(progress, view.contributors)
                while self._flight.ops and not self._flight.ops[0].tasks:  # all members hold it, or it failed
                    self._flight.return_first()
            except ProtocolError as error:
                failed = error
            if not view.contributing:
                failed = FtcommError("no contributing member is left; the state of the training is lost")
            for op in ops:
                if op.done:
                    self._returned(op)
            self._watch.disturbed(self._flight.issued)
            self._forget()
            self._view = view
            self._rosters.agree(view, progress)
            self._frozen = False
            if failed is not None:
                self._end(failed)
            else:
                self._enter(view)
                if self._flight.ops and self._flight.ops[0] is begun:
                    self._repair = begun
                self._start_monitor()
            self._changed.notify_all()
        self.nudge()
        if failed is not None:
            self._on_failed(failed)
        return resumed

    def fail(self, error: BaseException) -> None:
        """The end: every op in flight and every later one fails with `error`. The first error counts."""
        with self._mutex:
            self._end(error)
        self.nudge()
