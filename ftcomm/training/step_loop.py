"""The step loop of a replica: membership changes between steps, and a step counts when all have finished it.

    loop = StepLoop({"model": model, "optimizer": optimizer}, min_replicas=2, nan="skip", lr="linear")
    for step in loop.steps(1000):
        with loop.guard():              # an error that may pass: all repeat the step
            model(batch(step)).backward()
            buckets.wait()
            optimizer.step()               # takes the vote: on all replicas, or on none

This happens between two calls of `begin` (boundaries have numbers of their own):

    boundary   joiners come in, sources copy their state, a joiner loads and replays what it has
    pause      fewer than min_replicas: a vote and a boundary every little while, until there are enough
    attempt    the body of the loop; the vote at its first optimizer.step(), commit(), or at its end
    outcome    commit: next step; repeat: the same step again, skip: the next one without an update
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ftcomm.arrays.dtensor import local
from ftcomm.control.rank_name import rank_name
from ftcomm.errors import ArgumentError, FtcommError, MismatchError, StateError, StepError
from ftcomm.process import ending, pending
from ftcomm.recorder.files import process_recorder
from ftcomm.recorder.layout import PhaseKind
from ftcomm.training.catchup import StateSource
from ftcomm.training.entries import as_entry
from ftcomm.training.joiner import FINISH, Joiner
from ftcomm.training.kinds import is_lbfgs, is_optimizer
from ftcomm.training.loop_terms import LoopTerms
from ftcomm.training.loss_scalers import LossScalers
from ftcomm.training.lr_scaling import lr_multiplier, scaled
from ftcomm.training.metrics import Metrics, Stopwatch
from ftcomm.training.optimizer_gate import OptimizerGates
from ftcomm.training.preemption import PreemptionHandler
from ftcomm.training.samples import SampleSource
from ftcomm.training.startup_check import check_start, policy
from ftcomm.training.state import Stateful, flatten
from ftcomm.training.throttle import Throttle
from ftcomm.training.vote import Outcome, StepDecision, Voter

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from ftcomm.groups.group import Group

log = logging.getLogger("ftcomm")

VOTE_EVERY = 0.05  # s between two votes while training pauses
TELL = 10.0  # seconds between two reports of where the time has gone
PAUSE = 3600.0  # s that a pause may last
PROGRESS = "ftcomm"  # the entry of the state that tells a joiner the step of the others

NanPolicy = Literal["raise", "skip"] | Callable[[int], StepDecision]


class LoopProgress:
    """The position of the loop, the same on all members. It travels with the state, so a joiner learns it at once."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.attempts = 0  # discarded attempts at this step
        self.paused = False

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load nothing: the position of the step at which this replica came in was taken over then."""

    def take(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: type(value)(state[name]) for name, value in vars(self).items()})


class StepLoop:
    """The step loop of this rank. One at a time; not thread-safe. All ranks of the job make it with equal arguments.

    state: what a joiner must take over: modules, optimizers, schedulers, anything with state_dict and load_state_dict,
        arrays of NumPy or CuPy, tensors, and dicts and lists of them, under the same names on every replica. The first
        boundary checks that all of it can be sent. `ftcomm.steps` says what this needs. An entry may have
        `begins(step)`, which is called before each attempt at a step, and `settled(outcome)`, which is called after it;
        a joiner keeps the latter calls while the state is on its way, and makes them later.
    group: default: the default group.
    vote: whether all replicas agree that a step is finished before its update, by one small all-reduce. Without it a
        local error ends this replica, and the others go on.
    min_replicas: while fewer contribute, training pauses at the boundary, for `pause_timeout` seconds at most. The vote
        of a step notices a loss in it; that step is completed.
    nan: what to do when the loss given to `commit`, or a gradient of an optimizer in `state`, is not finite. None: do
        not look; "skip": no update, go on with the next step; "raise": `StepError` on all replicas; or a callable that
        gets the step and returns a `StepDecision`. The look at the gradients reads them once.
    lr: the factor for learning rates of optimizers in `state` while replicas are away: "none", "linear" or "sqrt" of
        the share of the `replicas` of the job that have contributed. Schedulers do not see it.
    repeat_on: exceptions that `guard` takes for errors that may pass, besides CUDA's and those that follow from an
        error on another replica.
    max_repeats: attempts at one step that may be discarded before all raise `StepError`.
    on_repeat: called on every member when an attempt was discarded, to clear what it has left behind, such as
        `GradientBuckets.abandon`. Gradients of optimizers in `state` are zeroed in place.
    start: the first step of a new job that goes on from a checkpoint; a joiner learns its step from the others.
    catchup_mbps: million bytes a second that this replica sends to joiners at most; default FTCOMM_CATCHUP_MBPS.
    initial_state: what to do if the replicas of a new job do not begin with the same state. "check": `StateError` on
        all; "lowest": all take that of the lowest replica, and its `start`; "trust": do not look, nor compare a sample
        of the state once a joiner has caught up. Default: FTCOMM_START, or "check". The check reads the state once.
        With each of the three, one small all-reduce compares `start`, the number of steps, `vote`, `min_replicas`, `lr`
        and this setting; if they differ, all raise `StateError`.

    Raises `ArgumentError`, `SettingsError`, `StateError`.
    """

    def __init__(
        self,
        state: Mapping[str, Any] | None = None,
        group: Group | None = None,
        *,
        vote: bool = True,
        min_replicas: int = 0,
        pause_timeout: float = PAUSE,
        nan: NanPolicy | None = None,
        lr: str = "none",
        repeat_on: tuple[type[Exception], ...] = (),
        max_repeats: int = 3,
        on_repeat: Callable[[], object] | None = None,
        start: int | None = None,
        catchup_mbps: float | None = None,
        initial_state: str | None = None,
    ) -> None:
        if group is None:
            from ftcomm.groups.default_group import default_group

            group = default_group()
        self._group = group
        total = group.replicas
        self._given, self._first_given = state or {}, dict(state or {})
        state = {name: as_entry(name, value) for name, value in (state or {}).items()}
        _check_arguments(state, vote, min_replicas, total, nan, lr)
        self._entries = state
        self._vote, self._min, self._pause_timeout = vote, min_replicas, pause_timeout
        self._nan, self._lr, self._total = nan, lr, total
        self._repeat_on = (*_passing(), *repeat_on)
        self._max_repeats, self._on_repeat = max_repeats, on_repeat
        self._optimizers = [entry for entry in state.values() if is_optimizer(entry)]
        # A joiner learns the step of the others once it is in a view, which is not before it comes to its loop.
        here = 0 if group.internals.outside else group.next_boundary - group.internals.lag
        self._progress = LoopProgress(here if start is None else start)
        self._scalers = LossScalers(state)
        self._shared: dict[str, Stateful] = {**state, PROGRESS: self._progress}
        # Whether an entry or a policy needs the contributors of a step.
        self._counts = vote or any(hasattr(entry, "settled") for entry in state.values())
        self._gates = OptimizerGates(state.values(), self)
        self._throttle = Throttle.from_env(catchup_mbps)
        self._initial_state = policy(initial_state)
        self._voter: Voter | None = None
        self._source: StateSource | None = None
        self._samples: SampleSource | None = None
        self._joiner: Joiner | None = None
        self._preemption: PreemptionHandler | None = None
        self._watch = Stopwatch()
        self.followed = False  # another loop has begun before this one was at its end
        self._in_step = False
        self._recorder = process_recorder()
        self._attempt: tuple[int, int] | None = None  # as it is recorded
        self._stalled = 0.0  # the group's stalled seconds when this step began
        self._ended = False
        self._decision: StepDecision | None = None  # the decision on this attempt
        self._counted: frozenset[int] = frozenset()
        self._present: frozenset[int] = frozenset()  # the replicas in the last vote
        self._told = time.monotonic()
        self._failed: Exception | None = None  # the error of this attempt on this rank
        self.outcome: Outcome | None = None
        self.lr_scale = 1.0

    # -- the loop ------------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Yield the steps up to `total` - 1; a repeated step comes again. Blocks at each boundary."""
        try:
            while (step := self.begin(total)) is not None:
                yield step
        finally:
            self.close()

    def begin(self, total: int | None = None) -> int | None:
        """End the last attempt, if there is one, pass the boundary, and return the next step.

        None when the loop is over: `total` steps are done, and a joiner has all of its state; or this replica has left
        the job (`group.drained`), or joins a job that is in a later loop of the script. Blocks at the boundary, while
        training pauses, and at the end while a joiner still fetches its state from here. Raises `StepError`,
        `StateError`, `RemovedError`, and `FtcommError` if another loop has begun meanwhile.
        """
        if self._source is None and not self._ended:
            self._open(total)
        if self.followed:
            raise FtcommError(
                f"{rank_name(self._group.replica, self._group.shard)}: this step loop ended when another began. "
                "Have one loop at a time, and none inside of another"
            )
        if self._in_step:
            self._settle()
        if self._ended:
            return None
        self._check_entries()
        self._gates.remove()
        paused_since: float | None = None
        pause: tuple[int, int] | None = None
        while self._pass_boundary():
            if total is not None and self.step >= total:
                self._finish(total)
                break
            self._tell_metrics(TELL)
            if not self._progress.paused:
                if paused_since is not None:
                    self._say("training_goes_on", step=self.step, seconds=round(time.monotonic() - paused_since, 3))
                if pause is not None:
                    self._recorder.finish(pause)
                self._watch.lap("boundary")
                return self._enter()
            if paused_since is None:
                paused_since = time.monotonic()
                pause = self._recorder.begin(
                    PhaseKind.PAUSE,
                    step=self.step,
                    number=len(self._present),
                    note=f"{self._min} needed",
                    lasts=self._pause_timeout,
                )
                self._say("training_pauses", step=self.step, contributing=len(self._present), least=self._min)
            self._watch.lap("boundary")
            self._vote_in_pause(paused_since)
            self._watch.lap("paused")
        self.close()
        ending.complete()
        return None

    def commit(self, loss: Tensor | float | None = None) -> bool:
        """Returns whether this step counts. The first call of a step takes the vote, and blocks until all have come to
        it.

        False: do not update, and call `begin` again. Optimizers in `state` take the vote by themselves, so a script
        needs this call only for optimizers elsewhere, or to have a `loss` looked at.
        """
        return self.decision(loss) is StepDecision.COMMIT

    def decision(self, loss: Tensor | float | None = None) -> StepDecision:
        """Does what `commit` does, but returns the decision."""
        if not self._in_step:
            return StepDecision.COMMIT  # before or after the loop
        if self._decision is None:
            pending.settle()  # what was called in this step belongs to it
            with self._recorder.phase(PhaseKind.VOTE, step=self.step):
                self._decision, self._counted = self._take_vote(self._mine(loss))
            healthy = len(self._counted) if self._vote else self._total
            self.lr_scale = lr_multiplier(self._lr, healthy, self._total)
        return self._decision

    def update(self, optimizer: Optimizer, step: Callable[[], object]) -> None:
        """Let an optimizer step, if the step counts. Its gate calls this."""
        self._scalers.check_caller(self.step)
        self._settle_snapshot()
        if self._joiner is not None and self._joiner.behind:
            self._joiner.scale(self.lr_scale)
            step()
        else:
            with scaled(optimizer, self.lr_scale):
                step()

    def scaled(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
        """Apply the policy's learning rates to an optimizer that is not in `state`, inside the block."""
        return scaled(optimizer, self.lr_scale)

    def fail(self, error: Exception) -> None:
        """Give this attempt up, after an error that may pass: all will repeat the step. Go on with the next one.

        Raises `error` where no step can be repeated: there are no votes, or the step counts already, so that its update
        may have been made, or the others of this replica would wait for this rank in groups of another backend.
        """
        repeats = self._vote and self._group.internals.repeats
        if not repeats or not self._in_step or self._decision is StepDecision.COMMIT:
            raise error
        if self._failed is None:
            self._failed = error
            said, mismatch = f"{type(error).__name__}: {error}"[:200], isinstance(error, MismatchError)
            self._report("step_failed", step=self.step, error=said, mismatch=mismatch)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """A context in which an error that may pass (see `repeat_on`) ends the body, and all repeat the step."""
        try:
            yield
        except self._repeat_on as error:
            self.fail(error)

    def close(self) -> None:
        """End the loop, or give it up; idempotent. Optimizers and schedulers step as usual afterwards."""
        if self.behind and not self._ended:
            log.warning(
                "%s: leaves the step loop at step %d before it has caught up with the others, so its "
                "`state` is not that of the job: do not save or evaluate it (StepLoop.behind)",
                *(rank_name(self._group.replica, self._group.shard), self.step),
            )
        self._ended = True
        self._in_step = False
        self._record_outcome(failed=True)  # of a step that was given up
        self._gates.remove()
        self._group.internals.on_step_error = None
        if self._group.internals.step_loop is self:
            self._group.internals.step_loop = None
        if self._source is not None:
            self._source.settle()
        if self._joiner is not None:
            self._joiner.close()
        if self._preemption is not None:
            self._preemption.__exit__()
            self._preemption = None
        if self._voter is not None:
            self._voter.close()

    # -- what can be seen ----------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The training step that is under way, or comes next."""
        return self._progress.step

    @property
    def behind(self) -> bool:
        """Whether this replica has come back and its `state` is not that of the others: it is fetched, or replayed, or
        the loop ended before it was. False in all others, and at the end of a loop that is complete."""
        return self._joiner is not None and self._joiner.behind

    def metrics(self) -> Metrics:
        """The time that this loop has spent so far, by purpose."""
        return self._watch.read()

    # -- boundaries ----------------------------------------------------------------------------------------------

    def _open(self, total: int | None) -> None:
        group = self._group
        before, group.internals.step_loop = group.internals.step_loop, self
        if before is not None:
            before.close()
            before.followed = True
        group.internals.loop += 1
        if self._left_out():  # the others must not wait for code before the job's present loop
            return
        self._watch = Stopwatch()
        flatten(self._shared)  # what cannot be sent must be an error now, not when a replica comes back
        # From here on this rank serves the state to others.
        self._source = StateSource(group, self._shared, overlap=bool(self._optimizers), throttle=self._throttle)
        self._samples = SampleSource(group, self._entries)
        if self._vote or (self._counts and group.shards > 1):
            self._voter = Voter(group)
        self._preemption = PreemptionHandler(group).__enter__()
        group.ready()
        if self._left_out():  # the job has gone on meanwhile
            return
        if group.shard == 0:
            group.emit("trains")  # tells a launcher that an earlier loop was not the last
        self._fresh = group.internals.catching_up
        if not self._fresh and group.next_boundary == 0:
            terms = LoopTerms(self.step, total, self._initial_state, self._vote, self._min, self._lr)
            self._progress.step = check_start(group, self._entries, terms)
        if self._vote:
            group.internals.on_step_error = self.fail

    def _check_entries(self) -> None:
        """Raise `StateError` if the script has put another object in the place of an entry, of which this loop would
        know nothing, and a replica that comes back would get the old one."""
        for name, entry in self._first_given.items():
            if self._given.get(name, entry) is not entry:
                raise StateError(
                    f"step {self.step}: the entry {name!r} of `state` is another object than when this loop was made, "
                    "so a replica that comes back would get the old one. Change it in place, or put what is replaced, "
                    "as arrays of JAX, one level deeper: state = {'kept': kept}; kept['params'] = new"
                )

    def _left_out(self) -> bool:
        """Whether the job that this replica joins is in a later loop, in which alone it can be given a state. This one
        ends then, and takes no boundary."""
        internals = self._group.internals
        if not internals.behind:
            return False
        log.info(
            "%s: leaves out step loop %d of the script, as the job is in step loop %d",
            *(rank_name(self._group.replica, self._group.shard), internals.loop, internals.loop_of_job),
        )
        self.close()
        return True

    def _pass_boundary(self) -> bool:
        """Pass the boundary. False if this replica has left the job."""
        group, source, samples = self._group, self._source, self._samples
        assert source is not None
        assert samples is not None
        assert self._preemption is not None
        self._preemption.at_boundary()
        boundary = group.next_boundary
        with self._recorder.phase(PhaseKind.BOUNDARY, step=self.step, number=boundary):
            view = group.boundary(boundary)
        if group.drained:
            return False
        source.at_boundary(boundary, view)
        samples.at_boundary(boundary, view)
        if self._fresh:
            self._fresh = False
            compares = self._initial_state != "trust"
            self._joiner = Joiner(group, self._shared, self._scalers, view, boundary, compares=compares)
            self._progress.take(self._joiner.agree(PROGRESS))
        if self._joiner is not None:
            self._joiner.at_boundary(boundary, view)
        group.internals.lag = boundary - self.step
        self._recorder.lag(group.internals.lag)
        return True

    def _finish(self, total: int) -> None:
        if self._joiner is not None:
            self._joiner.finish()
        elif self.outcome is None and self._group.internals.loop > 1:
            log.warning(
                "%s: step loop %d of the script has no step to do: it goes up to step %d, and the loop "
                "before it ended at step %d. Give it a higher number, or start=0",
                *(rank_name(self._group.replica, self._group.shard), self._group.internals.loop, total, self.step),
            )
        assert self._source is not None
        assert self._samples is not None
        with self._recorder.phase(PhaseKind.LINGER, step=self.step):
            self._source.linger(FINISH)
            self._samples.linger()
        self._group.internals.lag += 1  # this boundary belongs to no step
        self._tell_metrics(0.0)
        if self._group.shard == 0:
            self._group.emit("trained", step=self.step)  # tells a launcher that a later failure is not in a step

    def _enter(self) -> int:
        self._decision, self._counted, self._failed = None, frozenset(), None
        self._stalled = self._group.internals.stalled_seconds()
        self._in_step = True
        self._attempt = self._recorder.begin(PhaseKind.STEP, step=self.step, number=self._progress.attempts)
        self._gates.install()
        self._scalers.begin()
        for entry in self._entries.values():
            begins = getattr(entry, "begins", None)
            if begins is not None:
                begins(self.step)
        return self.step

    def _settle(self) -> None:
        """Settle the step after its body, and tell the outcome to all entries that want it."""
        decision = self.decision()
        self._in_step = False
        self._record_outcome(failed=decision is not StepDecision.COMMIT)
        self._settle_snapshot()
        progress = self._progress
        outcome = self.outcome = Outcome(progress.step, decision, self._counted)
        for entry in self._entries.values():
            settled = getattr(entry, "settled", None)
            if settled is not None:
                self._now_or_later(functools.partial(settled, outcome))
        self._account(decision)
        if decision is StepDecision.RAISE:
            raise StepError(f"step {progress.step}: {self._why()}") from self._failed
        if decision is StepDecision.REPEAT:
            progress.attempts += 1
            if progress.attempts > self._max_repeats:
                raise StepError(
                    f"step {progress.step} was given up after {progress.attempts} attempts: {self._why()}"
                ) from self._failed
            self._tidy()
        else:
            progress.step += 1
            progress.attempts = 0

    def _record_outcome(self, *, failed: bool) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._recorder.finish(attempt, failed=failed)

    def _now_or_later(self, action: Callable[[], object]) -> None:
        if self._joiner is not None and self._joiner.behind:
            self._joiner.keep(action)
        else:
            action()

    def _account(self, decision: StepDecision) -> None:
        contributes = self._group.contributes
        before, self._stalled = self._stalled, self._group.internals.stalled_seconds()
        stalled = self._stalled - before
        if decision is StepDecision.COMMIT:
            self._watch.lap("training" if contributes else "catching_up", stalled)
            if contributes:
                self._watch.count("steps")
        else:
            self._watch.lap("wasted", stalled)
            self._watch.count("skipped" if decision is StepDecision.SKIP else "discarded")
            self._say("step_discarded", step=self.step, decision=decision.name.lower())

    def _tidy(self) -> None:
        self._scalers.repeat()
        if self._on_repeat is not None:
            self._on_repeat()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.grad.zero_()  # in place, since it may be a view into a bucket

    def _settle_snapshot(self) -> None:
        assert self._source is not None
        seconds = self._source.settle()
        if seconds:
            self._watch.add("snapshot", seconds)
            self._watch.count("snapshots")

    # -- votes ---------------------------------------------------------------------------------------------------

    def _mine(self, loss: Tensor | float | None) -> StepDecision:
        """Returns the decision of this rank on its attempt."""
        if self._failed is not None:
            return StepDecision.REPEAT
        if self._nan is None or self._finite(loss):
            return StepDecision.COMMIT
        if callable(self._nan):
            decision = self._nan(self.step)
        else:
            decision = StepDecision.SKIP if self._nan == "skip" else StepDecision.RAISE
        if decision is not StepDecision.COMMIT:
            self._failed = FtcommError("the loss or a gradient is not finite here")
            self._report("step_failed", step=self.step, error=str(self._failed))
        return decision

    def _finite(self, loss: Tensor | float | None) -> bool:
        if loss is not None and not math.isfinite(float(loss)):
            return False
        grads = [
            local(p.grad) for o in self._optimizers for g in o.param_groups for p in g["params"] if p.grad is not None
        ]
        if not grads:
            return True
        import torch

        return bool(torch.nn.utils.get_total_norm(grads, math.inf).isfinite())

    def _take_vote(self, mine: StepDecision) -> tuple[StepDecision, frozenset[int]]:
        # The contributors of the step are the same on all members; views arrive at different times.
        contributors = frozenset(self._group.contributors)
        if not self._counts:
            return StepDecision.COMMIT, contributors
        # A rank that repeats may have reduced a part of the step, for which none counts. Otherwise all say the same.
        contributed = None if mine is StepDecision.REPEAT else self._contributed()
        if self._vote:
            assert self._voter is not None
            decision, present, counted = self._voter.take(mine, contributed)
            self._saw(present)
            return decision, counted
        counted = contributors if contributed is None else contributed
        return StepDecision.COMMIT, counted if self._voter is None else self._voter.agree(counted)

    def _contributed(self) -> frozenset[int] | None:
        """Returns the replicas whose input is in all that was reduced in this step; None if nothing was."""
        try:
            return frozenset(self._group.contributed())
        except FtcommError:
            return None

    def _saw(self, present: frozenset[int]) -> None:
        """Note the replicas that have voted."""
        self._present = present
        self._progress.paused = len(present) < self._min

    def _vote_in_pause(self, since: float) -> None:
        """Vote during a pause on whether there are enough replicas again."""
        time.sleep(VOTE_EVERY)
        seconds = time.monotonic() - since
        assert self._voter is not None
        mine = StepDecision.RAISE if seconds > self._pause_timeout else StepDecision.COMMIT
        decision, present, _ = self._voter.take(mine)
        self._saw(present)
        if decision is StepDecision.RAISE:
            raise StepError(
                f"training has paused for {seconds:.0f} s at step {self.step}: {len(present)} replicas contribute, "
                f"min_replicas={self._min}. Start the others again, or allow more with pause_timeout."
            )

    def _why(self) -> str:
        if self._failed is not None:
            return f"{type(self._failed).__name__}: {self._failed}"
        return "another replica has failed in it; see its output, and the events step_failed"

    def _report(self, kind: str, **fields: str | int | float) -> None:
        """Log and report what has happened to this rank."""
        text = ", ".join(f"{name} {value}" for name, value in fields.items())
        log.warning("%s: %s: %s", rank_name(self._group.replica, self._group.shard), kind.replace("_", " "), text)
        self._group.emit(kind, **fields)

    def _say(self, kind: str, **fields: str | int | float) -> None:
        """Report what all have decided; one rank does so for all."""
        if self._group.shard == 0 and self._group.replica == min(self._present, default=-1):
            self._report(kind, **fields)

    def _tell_metrics(self, every: float) -> None:
        """Report metrics for `ftcomm status`, from one rank of each replica."""
        now = time.monotonic()
        if self._group.shard == 0 and now - self._told >= every:
            self._told = now
            metrics = self.metrics()
            fields = {name: round(value, 3) for name, value in vars(metrics).items()}
            self._group.emit("metrics", step=self.step, effective=round(metrics.effective, 4), **fields)


def _passing() -> tuple[type[Exception], ...]:
    """Returns the errors that may pass, or that follow from one on another replica."""
    torch = sys.modules.get("torch")
    found = (getattr(torch, name, None) for name in ("OutOfMemoryError", "AcceleratorError"))  # some versions lack one
    return (MismatchError, *(error for error in found if error is not None))


def _check_arguments(
    state: Mapping[str, Stateful], vote: bool, least: int, total: int, nan: NanPolicy | None, lr: str
) -> None:
    lr_multiplier(lr, 1, 1)
    if nan is not None and nan not in ("raise", "skip") and not callable(nan):
        raise ArgumentError(f"nan={nan!r}; expected None, 'raise', 'skip', or a callable that returns a StepDecision.")
    if not vote and (least > 0 or nan is not None or lr != "none"):
        raise ArgumentError("vote=False with min_replicas, nan or lr: these rest on the vote; leave vote=True.")
    if least > total:
        raise ArgumentError(f"min_replicas={least} in a job of {total} replicas; training would never begin.")
    if PROGRESS in state:
        raise ArgumentError(f"`state` has an entry {PROGRESS!r}, a name that the step loop needs; call it otherwise.")
    if vote and any(is_lbfgs(entry) for entry in state.values()):
        raise StateError(
            "LBFGS evaluates the loss several times a step, so there is no moment for a vote. Pass vote=False, or use "
            "an optimizer that needs the gradients only."
        )
