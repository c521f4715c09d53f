"""`ftcomm.steps`: the step loop in its short form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ftcomm.training.step_loop import StepLoop

if TYPE_CHECKING:
    from ftcomm.groups.group import Group


def steps(
    total: int,
    state: Mapping[str, Any] | None = None,
    group: Group | None = None,
    *,
    start: int | None = None,
    initial_state: str | None = None,
) -> Iterator[int]:
    """Yield the steps from 0 (or where a joining replica comes in) to `total` - 1. Blocks at each boundary. Not
    thread-safe.

    `state` names what a joining replica must take over: the module, the optimizer, learning-rate schedulers, anything
    with `state_dict` and `load_state_dict`; also arrays of NumPy or CuPy, tensors, and dicts and lists of them, which
    are overwritten in place. It must hold the same names on every replica; an entry that cannot be sent is an error at
    the first boundary. A joiner fetches the state in the background while it runs the loop body, with its input left
    out of every reduction. Its optimizers and schedulers do nothing until the state is there and then repeat what they
    missed (see replay.py), so at the end all replicas hold the same bits. That needs four things:

    - A step must end with `optimizer.step()` on gradients that were reduced over the group: the update must not depend
      on this replica's own weights.
    - Optimizers, schedulers and a `GradScaler` must be entries of `state` themselves, not hidden inside another object.
    - Let data be a function of the step, or give an entry `settled` (see `ftcomm.training.StepLoop`): it is loaded as
      it was at the step at which the replica joined, some steps ago, and then gets the calls that it missed. Other
      entries are taken over before the first step, which is at once if they hold plain values only. For tensors and
      arrays that no optimizer in `state` has, and for a state without an optimizer, the joiner waits.
    - Only `optimizer.step()` may change parameters and what an optimizer keeps: a source copies them while forward and
      backward run. It finds out if they change otherwise, and copies before the step from then on.

    `start` is the first step of a new job that goes on from a checkpoint, the same on all replicas. `initial_state`
    says what happens if the replicas of a new job do not begin with the same state: "check" (`StateError` on all),
    "lowest" (all take that of the lowest replica) or "trust"; the default is FTCOMM_START, or "check".

    The loop ends early when the replica is to leave (`group.drained`): when the job is drained, after `group.leave()`
    on any rank of it, or on SIGTERM. A loop in the main thread takes SIGTERM so while it runs, unless the program has a
    handler of its own. No step is lost then. A second SIGTERM acts as it does by default.

    A script may have several loops, the same on all replicas. They count on: a second loop begins with the step at
    which the first one has ended. A joiner leaves out the loops that the job has behind it.

    There are no votes: an error in the body ends this replica, and the others go on. `ftcomm.training.StepLoop` is the
    same loop with votes, pauses and policies. Raises `StateError` when the state cannot be fetched or does not fit,
    `RemovedError` when the job went on without this replica.
    """
    yield from StepLoop(state, group, vote=False, start=start, initial_state=initial_state).steps(total)
