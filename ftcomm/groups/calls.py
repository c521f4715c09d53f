"""The collectives as a user calls them, the same on every kind of group."""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from sys import _getframe
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from ftcomm.arrays.flat import NONE, Flat, plain
from ftcomm.collective.member import GroupExchange
from ftcomm.collective.operation import Operation
from ftcomm.engines.base import CallEngine, CollectiveCall
from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError, MismatchError, copy_of
from ftcomm.kernels.call_codes import COMPRESSIONS, UNKNOWN
from ftcomm.kernels.dtypes import BYTES
from ftcomm.p2p.calls import Messages
from ftcomm.p2p.progress import ProgressEngine
from ftcomm.process.turn import Series, Turn
from ftcomm.recorder.callers import find, known
from ftcomm.recorder.files import process_recorder

_INPUT = COMPRESSIONS[0]  # elements travel as they are
_done: Callable[[Operation], bool] = operator.attrgetter("done")


class Span(NamedTuple):
    """A range of a result: elements `start` to `stop` (flat, C order), and the replicas whose inputs they contain."""

    start: int
    stop: int
    replicas: tuple[int, ...]


class Work:
    """A collective that was started. All methods from any thread."""

    def __init__(
        self,
        op: Operation,
        exchange: GroupExchange[Any],
        result: Any,
        finish: Callable[[], Any] | None,
        series: Series | None = None,
    ) -> None:
        self._op, self._exchange, self._series = op, exchange, series
        self._result, self._to_finish = result, finish
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether `wait` would return at once. Does not block."""
        return self._op.done

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the op has its result on this rank. Returns it: the array itself, or the new one.

        Raises what the op failed with, or `CollectiveTimeout` after `timeout` seconds; the op then goes on, and `wait`
        may be called again.
        """
        if not self._exchange.wait(self._op, timeout):
            raise CollectiveTimeout(
                f"replica {self._exchange.replica}, op {self._op.number}: not done within {timeout:g} s; it goes on, "
                "call wait() again or raise FTCOMM_OP_TIMEOUT"
            )
        return self._finish()

    def _finish(self) -> Any:
        if self._op.error is not None:
            raise copy_of(self._op.error)
        if self._series is not None:
            self._series.check()
        if self._to_finish is not None:
            with self._lock:
                if self._to_finish is not None:
                    self._result = self._to_finish()
                    self._to_finish = None
        return self._result

    @property
    def number(self) -> int:
        """The number of the op in its group, the same on all members."""
        return self._op.number

    @property
    def contributors(self) -> tuple[Span, ...]:
        """The replicas whose input the result contains, by ranges of elements; one range unless a member was lost in
        mid-op.

        Known when the op is done; raises `FtcommError` before.
        """
        if not self._op.done:
            raise FtcommError("the contributors are known when the op is done; call wait() first")
        return tuple(Span(*span) for span in self._op.spans())


_wrapper: CodeType | None = None


def made_through(wrapper: CodeType) -> None:
    """Let calls through `wrapper` be recorded with the line that has called it."""
    global _wrapper
    _wrapper = wrapper


class Calls(Messages):
    """The calls of a group. Every `root` is a rank: a position in `roster`.

    Arrays of torch, NumPy and CuPy are written in place and returned. An immutable array (JAX) stays as it is, and a
    new one with its shape is returned.
    """

    _site: tuple[CodeType | None, int, int] = (None, 0, 0)  # the last place of a call, and how it is recorded

    def __init__(
        self, name: str, me: int, p2p: ProgressEngine, engine: CallEngine, exchange: GroupExchange[Any]
    ) -> None:
        super().__init__(name, me, p2p)
        self._engine, self._exchange = engine, exchange
        self._turn: Turn[Operation] = Turn(_done)

    def _when(self) -> tuple[int, int]:
        """Returns the stamp of a call that this thread makes now, and the lag; see `Operation`."""
        return UNKNOWN, 0

    def allreduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        async_op: bool = False,
        atomic: bool = False,
        max_sms: int | None = None,
        compression: str | None = None,
    ) -> Any:
        """Reduce `x` over all contributing replicas. Every member gets the same bits. Returns `x`, or a new array for
        JAX.

        x: an array of any shape, with the same number of elements and dtype on every member.
        op: the same on every member: "sum", "avg" (divides by the number of actual contributors), "min", "max" or
            "product". fp16, bf16 and fp8 (e4m3fn, e5m2) are accumulated in fp32 and rounded once. Integers and bool
            also: "band", "bor", "bxor". Kernels that run whole ops (FTCOMM_ENGINE=gpu-kernel) reduce no fp8 elements.
        async_op: return a `Work` at once; `x` must not be touched before `Work.wait` has returned.
        atomic: the whole result has one set of contributors. If a member is lost in mid-op, the parts that contain its
            input are reduced again without it, unless all of them contain it. For that the op keeps a copy of its
            input, as large as `x`, until it returns (up to 32 MB of such memory stay with the process for the next op).
            Arrays up to 512 KB are always atomic, without cost. Two ranks take 1.4 times as long for 1 MB, 1.2 for
            16 MB, and 2.0 for 64 MB, where each op takes new memory (`ftcomm bench allreduce --compare atomic`).
        max_sms: streaming multiprocessors of the GPU that the op may occupy, at least 1; None: FTCOMM_SMS, or as many
            as pay. May differ between members. Without effect where the host drives: there FTCOMM_SMS holds for all
            ops.
        compression: the form in which elements travel between members, the same on all; see
            `ftcomm.collective.compression`.
            "input" (None): the dtype of `x`. Sums are exact or in fp32 in any case, so nothing is lost. But with
            FTCOMM_ALGORITHM=ring fp16, bf16 and fp8 do not go around the ring, since every hop would round their
            partial sums.
            "fp32": partial sums travel in fp32, so these dtypes go around the ring, too, with up to twice the bytes; in
            every other case the bytes and bits are those of "input". For fp32 and smaller floats.
            "fp8": 8 bits an element and 4 bytes a block of 256, half of the bytes of bf16 and a quarter of those of
            fp32. Inputs are coded (E4M3), summed in fp32, and the result is coded again; all members decode the same
            bytes, with the same result by any transport. Each coding changes an element x of a block with the largest
            element a by at most max(|x| / 16, a / 2^17): once for each input, and once for the result. A NaN or an
            infinity makes its block NaN. For fp32, fp16 and bf16, "sum" and "avg". It pays only over slow networks,
            since coding takes a core tens of nanoseconds an element. Kernels that run whole ops code it by themselves.

        Members match ops by the order of calls, which must be the same on all of them. In a step loop, a call that one
        member skips is found by the step: calls of the loop's thread, or of autograd for it, are compared only with
        calls of the same step (not where kernels run whole ops). Threads may wait for each other's ops, but the order
        of their calls has to be the same on all members. A call while another thread is in a call, or while an op of
        another thread is in flight, raises `ArgumentError` in both threads. If the thread of the step loop meets a call
        of another thread elsewhere, all get `MismatchError`. Calls of threads that never overlap are not noticed, see
        `ftcomm.process.turn`.

        Blocks (unless `async_op`) until all members of the view hold the result. A member that is lost meanwhile does
        not fail the op: it ends among the others. Where kernels run whole ops, it may be captured into a CUDA graph,
        whose replays are calls, see `ftcomm.engines.gpu_kernel.graphs`. Raises `ArgumentError`, `MismatchError`,
        `CollectiveTimeout`, `RemovedError`. With FTCOMM_VERIFY=1, which compares the results of all members, it raises
        `DivergenceError` on members whose result is not that of the majority, or on all without a majority;
        `ftcomm.collective.checksum` says what it cannot see.
        """
        self._may_call()
        if max_sms is not None and max_sms < 1:
            raise ArgumentError(f"max_sms={max_sms}: an all-reduce needs at least 1; None takes as many as pay")
        form = _INPUT if compression is None else compression
        made, finish = self._engine.all_reduce(x, op, atomic, form, max_sms)
        return self._carry_out(made, x, finish, async_op)

    def broadcast(self, x: Any, root: int, *, async_op: bool = False) -> Any:
        """Send `x` of rank `root` to all, in place. Any shape and dtype, the same number of elements on all. Returns
        `x`, or a new array for JAX.

        This call and all that follow survive a loss as `allreduce` does, with one limit: data that only a lost member
        had are gone. Then the call fails on every survivor with the same `LostError`, the content of the result is
        undefined, and the group goes on. What a survivor has already got is given to the others, and what only a lost
        member would have taken is left out.

        Ranks and their number change only at step boundaries, so a rank whose member was lost in mid-step is still
        there until the next one. A member that catches up gives its data like any other; only reductions leave it out.

        Blocks until this rank has its result and no other needs its input any more; with `async_op` it returns a `Work`
        at once. Any thread, in the order of calls that `allreduce` asks for. Raises `ArgumentError`, `LostError`,
        `MismatchError`, `CollectiveTimeout`, `RemovedError`.
        """
        self._may_move("broadcast")
        root = self._root("broadcast", root)
        into = self._engine.to_write(x)
        call = CollectiveCall("broadcast", self.roster, self.rank, root)
        op = self._engine.collective(call, into.flat, into.flat, into.dtype, into.count, into.size)
        return self._carry_out(op, x, into.finish, async_op)

    def reduce(self, x: Any, root: int, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce like `allreduce`, but with the result only in `x` of rank `root`; elsewhere `x` stays as it is.
        Returns `x`, or a new array for JAX on `root`.

        x, op: as with `allreduce`.

        Blocks, survives losses and raises as `broadcast` does.
        """
        self._may_move("reduce")
        root = self._root("reduce", root)
        staged = self._engine.stage(x)
        me, flat = self.rank, staged.flat
        call = CollectiveCall("reduce", self.roster, me, root, op)
        made = self._engine.collective(call, flat, flat, staged.dtype, len(flat), flat.itemsize)
        return self._carry_out(made, x, staged.finish if me == root else None, async_op)

    def allgather(self, out: Any, x: Any, *, async_op: bool = False, copy_engine: bool = False) -> Any:
        """Put `x` of all ranks, one after the other in rank order, into `out` of all. Any dtype. Returns `out`, or a
        new array for JAX.

        x: an array of any shape, with the same number of elements on all ranks.
        out: as many elements as `x` times the number of ranks, of the same dtype. If `x` is this rank's own part of it,
            nothing is copied for this rank.
        copy_engine: leave it to the copy engines of a GPU, which take no multiprocessor from a model; for contiguous
            arrays on the GPU or in pinned memory, and without `async_op`. It has no effect where the host drives. With
            copy engines any loss in mid-call is a `LostError` on all.

        Blocks, survives losses and raises as `broadcast` does.
        """
        if copy_engine and async_op:
            raise ArgumentError("allgather(copy_engine=True) blocks; leave async_op or copy_engine out")
        if copy_engine:
            self._may_call()
            if self._engine.allgather_by_copies(self, out, x):
                return out
        self._may_move("allgather")
        roster = self.roster
        into, given = self._engine.to_write(out), self._engine.to_read(x)
        self._fits("allgather", "out", into, given.count * len(roster), given)
        call = CollectiveCall("allgather", roster, self.rank)
        op = self._engine.collective(call, into.flat, given.flat, given.dtype, given.count, given.size)
        return self._carry_out(op, out, into.finish, async_op)

    def reduce_scatter(self, out: Any, x: Any, op: str = "sum", *, async_op: bool = False) -> Any:
        """Reduce `x` as `allreduce` does, and give each rank its part of the result in `out`. Returns `out`, or a new
        array for JAX.

        x: as many parts of equal size as there are ranks, in rank order. It stays as it is, except for `out` if that is
            a part.
        out: as many elements as one part, of the same dtype; may be this rank's part of `x`.
        op: as with `allreduce`.

        Blocks, survives losses and raises as `broadcast` does.
        """
        self._may_move("reduce_scatter")
        roster = self.roster
        into = self._engine.stage(out)
        given = self._engine.stage(plain(x))
        count = len(into.flat)
        if into.dtype != given.dtype or len(given.flat) != count * len(roster):
            raise ArgumentError(
                f"reduce_scatter of {len(given.flat)} x {given.dtype} among {len(roster)} ranks needs as many parts of "
                f"the same size, and out of one of them; got out of {count} x {into.dtype}"
            )
        call = CollectiveCall("reduce_scatter", roster, self.rank, op=op)
        made = self._engine.collective(call, into.flat, given.flat, into.dtype, count, into.flat.itemsize)
        return self._carry_out(made, out, into.finish, async_op)

    def alltoall(
        self,
        out: Any,
        x: Any,
        out_counts: Sequence[int] | None = None,
        in_counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """Send part `j` of `x` to rank `j`, and receive part `i` of `out` from rank `i`. Any dtype. Returns `out`, or
        a new array for JAX.

        out, x: arrays of any shape and of one dtype, with the parts one after the other in rank order.
        out_counts, in_counts: the elements of each part of `out` and of `x`, a number per rank; None: all parts are
            equal. Give them on all ranks or on none. With counts the ranks first exchange theirs, so the call then
            blocks until all have come, also with `async_op`.

        Blocks, survives losses and raises as `broadcast` does.
        """
        self._may_move("alltoall")
        into, given = self._engine.to_write(out), self._engine.to_read(x)
        if given.dtype != into.dtype:
            raise ArgumentError(f"alltoall of {given.dtype} into {into.dtype}; x and out need the same dtype")
        matrix = self._matrix(into, given, out_counts, in_counts)
        call = CollectiveCall("alltoall", self.roster, self.rank, counts=matrix)
        each = given.count // len(self.roster)
        op = self._engine.collective(call, into.flat, given.flat, given.dtype, each, given.size)
        return self._carry_out(op, out, into.finish, async_op)

    def gather(self, out: Any, x: Any, root: int, *, async_op: bool = False) -> Any:
        """Put `x` of all ranks, one after the other in rank order, into `out` of rank `root`. Any dtype. Returns `out`,
        or a new array for JAX.

        x: an array of any shape, with the same number of elements on all ranks.
        out: at `root` as many elements as `x` times the number of ranks, of the same dtype; None elsewhere.

        Blocks, survives losses and raises as `broadcast` does.
        """
        self._may_move("gather")
        root = self._root("gather", root)
        roster, me = self.roster, self.rank
        given = self._engine.to_read(x)
        into = self._only_at_root("gather", "out", out, self._engine.to_write, root)
        if me == root:
            self._fits("gather", "out", into, given.count * len(roster), given)
        call = CollectiveCall("gather", roster, me, root)
        op = self._engine.collective(call, into.flat, given.flat, given.dtype, given.count, given.size)
        return self._carry_out(op, out, into.finish, async_op)

    def scatter(self, out: Any, x: Any, root: int, *, async_op: bool = False) -> Any:
        """Give part `j` of `x` of rank `root` to rank `j`, in `out`. Any dtype. Returns `out`, or a new array for JAX.

        out: an array of any shape, with the same number of elements on all ranks.
        x: at `root` as many elements as `out` times the number of ranks, of the same dtype; None elsewhere.

        Blocks, survives losses and raises as `broadcast` does.
        """
        self._may_move("scatter")
        root = self._root("scatter", root)
        roster, me = self.roster, self.rank
        into = self._engine.to_write(out)
        given = self._only_at_root("scatter", "x", x, self._engine.to_read, root)
        if me == root:
            self._fits("scatter", "x", given, into.count * len(roster), into)
        call = CollectiveCall("scatter", roster, me, root)
        op = self._engine.collective(call, into.flat, given.flat, into.dtype, into.count, into.size)
        return self._carry_out(op, out, into.finish, async_op)

    def barrier(self, *, async_op: bool = False) -> Any:
        """Block until all members of the view have called it. Returns None. Survives losses and raises as `broadcast`
        does."""
        self._may_move("barrier")
        call = CollectiveCall("barrier", self.roster, self.rank)
        op = self._engine.collective(call, NONE.flat, NONE.flat, BYTES, 0, 1)
        return self._carry_out(op, None, None, async_op)

    # -- what they have in common ------------------------------------------------------------------------------------

    def _may_move(self, call: str) -> None:
        self._may_call()
        self._engine.may_move(call)

    def _root(self, call: str, root: Any) -> int:
        found = self._integer(root)
        if found is None or not 0 <= found < len(self.roster):
            raise ArgumentError(f"{call} with root={root!r}; expected a rank, 0 to {len(self.roster) - 1}")
        return found

    def _only_at_root(self, call: str, name: str, x: Any, flat: Callable[[Any], Flat], root: int) -> Flat:
        at_root = self.rank == root
        if at_root != (x is not None):
            raise ArgumentError(f"{call} needs {name} on rank {root}, and None elsewhere; this is rank {self.rank}")
        return flat(x) if at_root else NONE

    @staticmethod
    def _fits(call: str, name: str, large: Flat, count: int, small: Flat) -> None:
        if large.count != count or large.dtype != small.dtype:
            raise ArgumentError(f"{call} needs {name} of {count} x {small.dtype}; got {large.count} x {large.dtype}")

    def _matrix(
        self, into: Flat, given: Flat, out_counts: Sequence[int] | None, in_counts: Sequence[int] | None
    ) -> list[list[int]]:
        """Returns the number of elements from each rank to each."""
        n = len(self.roster)
        if out_counts is None and in_counts is None:
            if given.count != into.count or given.count % n:
                raise ArgumentError(
                    f"alltoall of {given.count} elements into {into.count} among {n} ranks: without counts both need "
                    f"the same number, a multiple of {n}"
                )
            return [[given.count // n] * n] * n
        counts = {"in_counts": (in_counts, given.count), "out_counts": (out_counts, into.count)}
        wrong = [
            f"{name}={None if told is None else list(told)} for {count} elements"
            for name, (told, count) in counts.items()
            if told is None or len(told) != n or min(told) < 0 or sum(told) != count
        ]
        # This rank takes part in the exchange in any case, since the others wait for it.
        mine = [-1] * (2 * n) if wrong else [*(in_counts or ()), *(out_counts or ())]
        table = np.empty((n, 2, n), np.int64)
        self.allgather(table, np.array(mine, np.int64))
        if wrong:
            raise ArgumentError(
                f"alltoall with {' and '.join(wrong)}: expected {n} numbers, none below 0, which add up to that"
            )
        sent: list[list[int]] = table[:, 0].tolist()
        taken: list[list[int]] = table[:, 1].T.tolist()
        for i, j in itertools.product(range(n), repeat=2):
            if sent[i][j] != taken[i][j] or sent[i][j] < 0:
                raise MismatchError(
                    f"alltoall: rank {i} sends {sent[i][j]} elements to rank {j}, which expects {taken[i][j]} (-1: "
                    "its counts do not fit its arrays, see the error there). in_counts[j] of rank i must be "
                    "out_counts[i] of rank j"
                )
        return sent

    def _carry_out(self, op: Operation, result: Any, finish: Callable[[], Any] | None, async_op: bool) -> Any:
        op.stamp, op.lag = self._when()
        frame = _getframe(2)
        here = frame.f_code
        if here is _wrapper:
            frame = frame.f_back  # type: ignore[assignment]
            here = frame.f_code
        code, instruction, op.caller = self._site
        if here is not code or frame.f_lasti != instruction:
            op.caller = self._new_site(frame)
        if async_op:
            return self._carry_out_async(op, result, finish)
        self._turn.run(self._exchange.run, op)
        if op.error is None and finish is None:
            return result
        return Work(op, self._exchange, result, finish)._finish()

    def _new_site(self, frame: FrameType) -> int:
        """Returns how the place of a call is recorded that is not that of the last call."""
        number = find(frame, process_recorder().text)
        if number and known(frame) == number:  # else it is that of a frame further out, which another call may not have
            self._site = frame.f_code, frame.f_lasti, number
        return number

    def _carry_out_async(self, op: Operation, result: Any, finish: Callable[[], Any] | None) -> Work:
        exchange, turn, series = self._exchange, self._turn, None
        if self._engine.by_stream:
            turn.check()
        else:
            series = turn.start(op)
        exchange.submit(op)
        return Work(op, exchange, result, finish, series)
