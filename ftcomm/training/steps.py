"""`ftcomm.steps`: the step loop in its short form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ftcomm.training.step_loop import StepLoop

if TYPE_CHECKING:
    from ftcomm.group import Group


def steps(
    total: int,
    state: Mapping[str, Any] | None = None,
    group: Group | None = None,
    *,
    start: int | None = None,
    initial_state: str | None = None,
) -> Iterator[int]:
    """Yield the steps from 0 (or where a joining replica comes in) to `total` - 1; blocks at each boundary.

    `state` names what a replica that joins a running job must take over: the module, the optimizer, learning-rate
    schedulers, anything with `state_dict` and `load_state_dict`; also NumPy arrays and tensors, and dicts and lists of
    them, which are written into in place. It must hold the same names on every replica; what cannot be sent is an error
    at the first boundary. A joiner fetches it in the background and runs the loop body all the while, its input left
    out of every reduction; its optimizers and schedulers do nothing until the state is there and then repeat what they
    missed (see replay.py), so at the end all replicas hold the same bits. For that,

    - a step must end with `optimizer.step()` on gradients that were reduced over the group: what the update uses must
      not depend on this replica's own weights;
    - optimizers and schedulers must be entries of `state` themselves, not hidden inside another object;
    - other entries are loaded as they were entering the step at which the replica joined, some steps ago; so let data
      be a function of the step, or give them `settled` (see `ftcomm.training.StepLoop`). Without an optimizer in
      `state` the joiner waits for its state;
    - parameters and what an optimizer keeps are changed by `optimizer.step()` only: a source copies them while forward
      and backward run. It finds out if they are not, and copies before the step from then on.

    `start` is the step to begin with in a new job that goes on from a checkpoint, the same on all replicas.
    `initial_state` says what to do if the replicas of a new job do not begin with the same state: "check" (`StateError`
    on all), "lowest" (all take that of the lowest replica) or "trust"; default FTCOMM_START, or "check".

    The loop ends early when the replica is to leave (`group.drained`): when the job is drained, when a rank of it has
    called `group.leave()`, or on SIGTERM, which a loop in the main thread takes so for as long as it runs, unless the
    program has a handler of its own. No step is lost then. A second SIGTERM acts as it does by default.

    Takes no votes: an error in the body ends this replica, and the others go on. `ftcomm.training.StepLoop` is the
    same loop with votes, pauses and policies. Raises `StateError` when the state cannot be fetched or does not fit,
    `ExpelledError` when the job went on without this replica.
    """
    yield from StepLoop(state, group, vote=False, start=start, initial_state=initial_state).steps(total)
