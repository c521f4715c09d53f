"""The interface of the machine that runs the kernels of an exchange: a GPU, or, for tests, Triton's interpreter.

All ops run on one stream, the *op stream*, one after the other. After a view change the op that was broken off goes on
by the launch that it has: what is left of it the host writes where that reads it, and calls nothing of the device.

    op stream       [keep] allreduce  collective  [keep] allreduce ...

Kernels see plain addresses. What `ctl`, `state`, `view` and the lanes' words mean is said in
`ftcomm.kernels.device.words`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from ftcomm.arrays import Staged
from ftcomm.transport.base import Peer
from ftcomm.transport.segment import Layout

if TYPE_CHECKING:
    from ftcomm.arrays.flat import Flat
    from ftcomm.engines.gpu_kernel.copies import Copies, Mover
    from ftcomm.kernels.device.variant import CollectiveVariant, Variant


class Reached(NamedTuple):
    """The memory of a member, as this process sees it."""

    words: int  # address for kernels of its segment, at whose word LANES_AT the copy of its flags begins
    staging: int  # address for kernels
    flags: int  # address for kernels: of the first lane
    lanes: memoryview  # ("Q") `words` for the host; of a peer read-only


class KernelLaunch(msgspec.Struct, frozen=True):
    """One launch of a kernel of `ftcomm.kernels.device.allreduce`: of `collective`, if it has that kind of variant. The
    device adds ctl, state and view, which it owns."""

    array: Any  # flat, what an op works on; the exchange keeps it alive until the op has returned
    count: int  # of elements
    call: int  # what members compare
    template: int  # by which the kernel says which launch it is; see ftcomm.engines.gpu_kernel.graphs
    chunks: int
    kept: Any  # a copy of `array` from before the op, if it is atomic and has several chunks; else None
    programs: int
    variant: Variant | CollectiveVariant  # constexprs that follow from the op; the device adds its own (BLOCK, THREADS)
    source: Any = (
        None  # of a collective: what this rank gives, as `array`; the array that has it is kept alive likewise
    )
    who: int = 0  # of a collective, see ftcomm.kernels.device.words
    pieces: Any = None  # of a collective with unequal pieces: their table, which is kept alive likewise


class Device(Protocol):
    """Made with this rank's segment, in whose words from EXPORT_AT on it leaves what `open` needs at the others.

    None of these blocks for the work of others, but where it says so. `reach`, `leave`, `using`, `stage`, `empty`,
    `address`, `release`, `mover` and `await_caller` are for any thread. The exchange calls what belongs to the op
    stream from one thread at a time, and `leave_tasks` while no launch looks at them.
    """

    layout: Layout
    blocking: bool  # the caller's array may be touched only when the op is done; False: as its stream says
    memory: str  # the type of a PyTorch device, whose memory its copy engines move, and that which is pinned
    own: Reached  # `lanes` is writable
    copies_at: int  # where in the staging of a rank that of the copies begins
    copies_chunk: int  # bytes in a slot of those
    ctl: memoryview  # ("Q") CTL_WORDS of them

    def reach(self, peer: Peer) -> Reached:
        """Make the memory of `peer` readable for kernels; the same answer if it is. Blocks. Raises `TransportError`."""

    def leave(self, peer: Peer) -> None:
        """No kernel reads it any more; idempotent."""

    def using(self, nonce: str) -> contextlib.AbstractContextManager[Reached | None]:
        """The memory of the peer with that nonce, readable within, whoever leaves it; None if it is not reached."""

    def programs(self, nbytes: int, lanes: int, sms: int | None) -> int:
        """Returns how many programs an op of `nbytes` in `lanes` lanes gets: `sms` at most (None: as many as pay)."""

    def stage(self, x: Any) -> Staged:
        """The memory of `x` as one flat array that kernels can work on. Raises `ArgumentError`."""

    def stage_bytes(self, x: Any, *, writes: bool) -> Flat:
        """The same of an array of any dtype, as bytes; which stays as it is unless an op `writes` to it."""

    def duplicate(self, array: Any) -> Any:
        """A copy of a flat array, in the order of the caller's current stream."""

    def words(self, words: Sequence[int]) -> Any:
        """A flat array with these 64-bit words, in the order of the caller's current stream, for which it may wait."""

    def address(self, array: Any) -> int:
        """Returns the address of the first element of a flat array."""

    def empty(self, array: Any) -> Any:
        """Memory like that of `array`, for a copy."""

    def capturing(self) -> bool:
        """Whether what the calling thread queues becomes part of a graph, instead of running."""

    def follow(self) -> None:
        """The op stream waits for what the caller's current stream has queued so far."""

    def launch(self, launch: KernelLaunch) -> None:
        """Queue the kernel. Raises `FtcommError` if it cannot be launched."""

    def copy(self, source: Any, to: Any) -> None:
        """Queue `to[:] = source`."""

    def mark(self) -> Any:
        """Returns a mark behind what the op stream has queued so far, for `release`."""

    def release(self, mark: Any) -> None:
        """The caller's current stream goes on when what `mark` stands for is done. The caller's thread, any time."""

    def copy_engines(self, me: int, members: Sequence[Reached], epoch: int, stop: Callable[[], bool]) -> Copies:
        """The copy-engine path between the memory of the members of an epoch, of which this one is number `me`."""

    def mover(self) -> Mover:
        """Copies that wait for nothing that was queued elsewhere, and whose `wait` takes no processor."""

    def await_caller(self) -> None:
        """Block until all is done that was queued on the caller's current stream."""

    def leave_tasks(self, tasks: Sequence[int]) -> int:
        """Write the tasks that are left of an op that was launched; returns their address for kernels. The driver is
        not called: it may be stuck behind that op."""

    def check(self) -> None:
        """Raises `FtcommError` if a kernel has failed in a way that no view change mends."""

    def wait_replays(self, seconds: float) -> bool:
        """Wait until all ops of graphs have ended that were replayed on the caller's current stream, or on one for
        which that waits; False if they have not after `seconds`. Raises `FtcommError` as `check` does."""

    def settle(self, seconds: float) -> bool:
        """Wait until all that was launched has ended; False if it has not after `seconds`."""

    def close(self) -> None:
        """Launch nothing from now on. Memory that others may still read stays until the process ends."""
