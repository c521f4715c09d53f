"""The parts of the step loop that need no other process: votes, rates, the gate, time, throttle, spilled tensors."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import AveragedModel

from ftcomm.errors import ArgumentError, FtcommError, MismatchError, SettingsError, StateError
from ftcomm.process import pending
from ftcomm.training.data import Batches
from ftcomm.training.lr_scaling import lr_multiplier, scaled
from ftcomm.training.metrics import Metrics, Stopwatch
from ftcomm.training.optimizer_gate import OptimizerGates
from ftcomm.training.rng import Rng
from ftcomm.training.spill import Limits, Spill
from ftcomm.training.step_loop import StepLoop
from ftcomm.training.throttle import Throttle
from ftcomm.training.vote import StepDecision, Voter, decide, fold, row_of

votes = st.sampled_from([0, *StepDecision])
tables = st.integers(1, 3).flatmap(
    lambda ranks: st.lists(
        st.tuples(st.lists(votes, min_size=4, max_size=4), st.lists(st.integers(0, 1), min_size=4, max_size=4)),
        min_size=ranks,
        max_size=ranks,
    )
)


@given(tables)
def test_one_bad_vote_of_any_rank_decides_and_all_ranks_must_count(table):
    rows = [row_of(np.array(said, np.uint8), np.flatnonzero(marks)) for said, marks in table]
    decision, present, counted = decide(fold(rows))
    assert decision == max([StepDecision.COMMIT, *itertools.chain(*(said for said, _ in table))])
    assert present == {r for r in range(4) if all(said[r] for said, _ in table)}
    assert counted == {r for r in range(4) if all(marks[r] for _, marks in table)}
    assert decide(fold(rows[::-1])) == (decision, present, counted), "the ranks have an order"
    assert decide(fold([fold(rows[:1]), *rows[1:]])) == (decision, present, counted), "it matters who folds what"
    assert len(fold(rows)) == len(rows[0]), "it grows with the ranks"


def test_a_rank_that_failed_has_not_done_all_of_the_step_so_nobody_may_pass_over_it():
    said = np.array([StepDecision.SKIP, StepDecision.REPEAT, StepDecision.COMMIT], np.uint8)
    assert decide(row_of(said, None))[0] is StepDecision.REPEAT
    assert max(StepDecision) is StepDecision.RAISE


class Members:
    """What a vote uses of a group; the first ops end as a vote does while others are still in the step."""

    def __init__(self, others=(), early=0):
        self.replica, self.others, self.early = 1, others, early
        self.replicas, self.shards, self.shard = 4, 1, 0
        self.ballots = []

    def allreduce(self, ballot):
        self.ballots.append(int(ballot[self.replica]))
        if self.early > 0:
            self.early -= 1
            raise MismatchError("others reduce a bucket")
        for replica, said in self.others:
            ballot[replica] += said


def test_a_vote_is_called_again_until_the_others_have_come_to_it():
    members = Members([(0, StepDecision.REPEAT), (2, StepDecision.COMMIT)], early=2)
    assert Voter(members).take(StepDecision.COMMIT) == (StepDecision.REPEAT, {0, 1, 2}, {0, 1, 2})
    assert members.ballots == [StepDecision.COMMIT, StepDecision.REPEAT, StepDecision.REPEAT]


def test_what_is_no_verdict_is_refused_where_it_is_said_and_ends_nobody_else():
    members = Members([(0, StepDecision.COMMIT)])
    for said in (9, 0, None):
        with pytest.raises(ArgumentError, match=f"replica 1 shard 0: a vote of {said}; expected one of COMMIT, SKIP"):
            Voter(members).take(said)
    assert members.ballots == []
    with pytest.raises(ArgumentError, match="replica 1 shard 0: a vote of 7"):
        outcome(Voters(), math.nan, nan=lambda step: 7)
    assert Voter(Members([(0, 250)])).take(StepDecision.COMMIT)[0] is StepDecision.REPEAT, (
        "who says that has not done the step"
    )
    assert Voter(Members([(0, 250), (2, StepDecision.RAISE)])).take(StepDecision.COMMIT)[0] is StepDecision.RAISE


def test_a_vote_that_another_thread_of_this_rank_is_in_the_way_of_says_so():
    members = Members()

    def crossed(ballot):
        raise ArgumentError("thread 'saver' called a collective of a group in which another thread was in one")

    members.allreduce = crossed
    with pytest.raises(
        ArgumentError, match=r"replica 1 shard 0 cannot vote on its step, .* loop's group: thread 'saver'"
    ):
        Voter(members).take(StepDecision.COMMIT)


def test_who_contributed_but_died_before_the_vote_counts():
    voter = Voter(Members([(0, StepDecision.COMMIT)]))
    assert voter.take(StepDecision.COMMIT, {0, 1, 3}) == (StepDecision.COMMIT, {0, 1}, {0, 1, 3})
    assert voter.agree({1, 3}) == {1, 3}


class Voters(Members):
    """For a whole step loop, at the end of a step in which 3 contributed and then died."""

    shard = next_boundary = 0
    contributors = (0, 1, 2, 3)
    contributing = frozenset({0, 1})  # the view of the loss has come here already

    def __init__(self, reduced=(0, 1, 3), others=()):
        super().__init__(others)
        self.reduced, self.reports = reduced, []
        self.internals = SimpleNamespace(outside=False, catching_up=False, lag=0, step_loop=None, repeats=True)

    def contributed(self):
        if self.reduced is None:
            raise FtcommError("nothing was reduced")
        return self.reduced

    def emit(self, kind, **fields):
        self.reports.append((kind, fields))


def outcome(group, loss, **arguments):
    """What a replica takes an attempt for."""
    loop = StepLoop({"batches": Batches(1000, 10, group=group)}, group, **arguments)
    if loop._vote:
        loop._voter = Voter(group)
    loop._in_step = True
    return loop.decision(loss), loop._counted


def test_whose_loss_is_not_finite_counts_as_the_others_do():
    """All pass over the step, and so over the batches of those who count, which have to be the same on all."""
    others = Voters(others=[(0, StepDecision.COMMIT)])
    here = outcome(others, math.nan, nan="skip")
    assert here == (StepDecision.SKIP, {0, 1, 3})
    there = Voters(others=[(0, StepDecision.SKIP)])
    assert outcome(there, 1.0, nan="skip") == here


def test_without_a_vote_who_counts_does_not_hang_on_when_a_loss_was_heard_of():
    """Gradients are accumulated: nothing is reduced in this step, so nothing tells who was there at its end."""
    told = Voters(reduced=None)
    late = Voters(reduced=None)
    late.contributing = frozenset({0, 1, 2, 3})
    assert outcome(told, 1.0, vote=False) == outcome(late, 1.0, vote=False) == (StepDecision.COMMIT, {0, 1, 2, 3})


def test_a_rank_that_reduced_nothing_meets_the_others_of_its_replica_all_the_same():
    group = Voters(reduced=None)
    loop = StepLoop({"batches": Batches(1000, 10, group=group)}, group, vote=False)
    loop._voter = Voter(group)
    rows = []
    loop._voter._intra = type(
        "IntraReplicaExchange", (), {"exchange": lambda self, row, fold: rows.append(row) or row}
    )()
    loop._in_step = True
    assert loop.decision() is StepDecision.COMMIT
    assert len(rows) == 1


def test_a_step_is_settled_when_the_calls_of_other_libraries_are_made(monkeypatch):
    group, order = Voters(), []
    monkeypatch.setattr(pending, "waits", [lambda: order.append("made")])
    monkeypatch.setattr(group, "contributed", lambda: order.append("asked") or {0, 1, 3}, raising=False)
    assert outcome(group, 1.0, vote=False)[0] is StepDecision.COMMIT
    assert order == ["made", "asked"]


def test_an_entry_that_the_script_has_replaced_is_an_error():
    state = {"batches": Batches(1000, 10, group=Voters()), "params": {"w": 1}}
    loop = StepLoop(state, Voters())
    loop._check_entries()
    state["params"]["w"] = 2
    loop._check_entries()
    state["params"] = {"w": 2}
    with pytest.raises(StateError, match="the entry 'params' of `state` is another object"):
        loop._check_entries()


def scaled_loop(**more):
    """A loop in whose first step the loss was scaled and the gradients unscaled, and its scaler."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    loop = StepLoop({"optimizer": optimizer, **({"scaler": scaler} if more.get("given", True) else {})}, Voters())
    loop._voter, loop._source = Voter(loop._group), SimpleNamespace(settle=lambda: 0.0)
    loop._group.internals.stalled_seconds = lambda: 0.0
    loop._enter()
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    return loop, optimizer, scaler


@pytest.mark.parametrize("error", [ValueError("x"), MismatchError("x")])
def test_a_step_that_failed_says_whether_the_calls_of_ranks_differed(error):
    group = Voters()
    loop = StepLoop({"batches": Batches(1000, 10, group=group)}, group)
    loop._in_step = True
    loop.fail(error)
    mismatch = isinstance(error, MismatchError)
    said = {"step": loop.step, "error": f"{type(error).__name__}: x", "mismatch": mismatch}
    assert group.reports[-1] == ("step_failed", said)


def test_a_scale_of_the_loss_is_as_before_when_an_attempt_is_repeated():
    """Whoever failed in it has not updated the scale, and the others have; and it can unscale again."""
    loop, optimizer, scaler = scaled_loop()
    loop._tidy()
    scaler.scale(torch.zeros(()))
    assert scaler.get_scale() == 4.0
    loop._gates.remove()
    loop._enter()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    loop._tidy()
    assert scaler.get_scale() == 4.0
    scaler.unscale_(optimizer)
    loop._gates.remove()


def test_a_scale_of_the_loss_that_no_joiner_would_get_is_an_error():
    loop, optimizer, scaler = scaled_loop(given=False)
    with pytest.raises(StateError, match="is stepped by a GradScaler that is no entry of `state`"):
        scaler.step(optimizer)
    loop._gates.remove()
    loop, optimizer, scaler = scaled_loop()
    scaler.step(optimizer)
    loop._gates.remove()


@pytest.mark.parametrize("behind", [False, True])
def test_a_loop_that_ends_before_the_replica_has_caught_up_says_so(behind, caplog):
    loop, *_ = scaled_loop()
    assert not loop.behind
    loop._joiner = SimpleNamespace(behind=behind, close=lambda: None)
    loop._voter = None
    loop.close()
    loop.close()
    assert loop.behind is behind
    said = [record.getMessage() for record in caplog.records]
    assert sum("before it has caught up" in text for text in said) == behind, said


def test_a_replica_without_a_slot_is_refused():
    members = Members()
    members.replica = 97
    with pytest.raises(ArgumentError, match="replica 97 has no slot in a vote of 97"):
        Voter(members)


@pytest.mark.parametrize(("policy", "expected"), [("none", 1.0), ("linear", 0.75), ("sqrt", math.sqrt(0.75))])
def test_rates_of_the_policies(policy, expected):
    assert lr_multiplier(policy, 3, 4) == expected
    assert lr_multiplier(policy, 4, 4) == lr_multiplier(policy, 5, 4) == 1.0


def test_a_scaled_rate_is_put_back_to_the_bit_and_no_scheduler_sees_it():
    def training(scale):
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.7}], lr=0.1)
        scheduler = schedules.ExponentialLR(optimizer, 0.9)  # reads the rate back
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            with scaled(optimizer, scale if step == 2 else 1.0):
                assert optimizer.param_groups[0]["lr"] == (scale if step == 2 else 1.0) * scheduler.get_last_lr()[0]
                optimizer.step()
            scheduler.step()
        return model.weight.detach().clone(), [group["lr"] for group in optimizer.param_groups]

    (plain, rates), (other, after) = training(1.0), training(0.3)
    assert rates == after
    assert not torch.equal(plain, other)


def test_an_error_inside_puts_the_rate_back():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=torch.tensor(0.1))
    rate = optimizer.param_groups[0]["lr"]
    with pytest.raises(ZeroDivisionError), scaled(optimizer, 0.5):
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["lr"] is rate


class Decider:
    def __init__(self, decision):
        self.said, self.asked, self.updates = decision, 0, 0

    def decision(self):
        self.asked += 1
        return self.said

    def update(self, optimizer, step):
        self.updates += 1
        step()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of a step that is skipped
@pytest.mark.parametrize("decision", StepDecision)
def test_what_moves_behind_the_gate(decision):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedules.StepLR(optimizer, 1, 0.5)
    average = AveragedModel(model)
    decider, before = Decider(decision), model.weight.detach().clone()
    state, kind = scheduler.state_dict().keys(), type(scheduler)
    gates = OptimizerGates([model, optimizer, scheduler, average], decider)
    gates.install()

    def closure():
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == pytest.approx(model(torch.ones(1, 2)).sum().item(), abs=1.0)
    average.update_parameters(model)
    scheduler.step()
    assert scheduler.state_dict().keys() == state, "the gate is in the state that a checkpoint takes"
    gates.remove()
    gates.remove()
    assert type(scheduler) is kind
    assert decider.asked == 3
    assert average.n_averaged == (decision is StepDecision.COMMIT)
    assert torch.equal(before, model.weight) == (decision is not StepDecision.COMMIT)
    moved = decision in (StepDecision.COMMIT, StepDecision.SKIP)
    assert optimizer.param_groups[0]["lr"] == (0.05 if moved else 0.1)
    optimizer.step()
    average.update_parameters(model)
    assert decider.asked == 3
    assert decider.updates == (1 if decision is StepDecision.COMMIT else 0)


def test_every_moment_is_of_one_part():
    now = [10.0]
    watch = Stopwatch(lambda: now[0])
    spent = ((1.0, "boundary", 0.0), (4.0, "training", 0.0), (2.0, "paused", 0.0), (3.0, "training", 1.0))
    for seconds, part, stalled in spent:
        now[0] += seconds
        assert watch.lap(part, stalled) == seconds
    watch.count("steps")
    watch.add("snapshot", 0.5)
    parts = dict(boundary=1.0, training=6.0, paused=2.0, stalled=1.0, snapshot=0.5)
    assert watch.read() == Metrics(steps=1, total=10.0, **parts)
    assert watch.read().effective == 0.6, "an op that stands still trains nothing"
    assert Metrics().effective == 0.0


def test_a_throttle_spreads_what_is_sent():
    now, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    throttle = Throttle(1e6, lambda: now[0], sleep)
    for _ in range(5):
        throttle.take(500_000)
    assert now[0] == pytest.approx(2.0)
    now[0] += 10.0  # what was not used is not saved up
    slept.clear()
    for _ in range(3):
        throttle.take(500_000)
    assert slept == pytest.approx([0.5, 0.5])


def test_the_rate_of_a_throttle_is_checked(monkeypatch):
    monkeypatch.setenv("FTCOMM_CATCHUP_MBPS", "200")
    assert Throttle.from_env()._rate == 2e8
    assert Throttle.from_env(50.0)._rate == 5e7
    for wrong in ("fast", "0.5", "-1", "nan", "inf"):
        monkeypatch.setenv("FTCOMM_CATCHUP_MBPS", wrong)
        with pytest.raises(SettingsError, match=f"FTCOMM_CATCHUP_MBPS={wrong}; expected"):
            Throttle.from_env()


def test_what_is_kept_comes_back_from_memory_and_disk(tmp_path):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    choose = random.Random(seed)
    spill = Spill(Limits(memory=3000, disk=1 << 20), str(tmp_path))
    kept, most = [], 0
    for _ in range(300):
        if kept and choose.random() < 0.5:
            expected, handle = kept.pop(0)
            found = handle.take()
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        else:
            dtype = choose.choice([torch.float32, torch.bfloat16, torch.float64])
            tensor = torch.randn(choose.randrange(0, 20), choose.randrange(1, 20)).to(dtype)
            kept.append((tensor.clone(), spill.put(tensor.t().contiguous().t())))
            tensor.zero_()
        most = max(most, spill.on_disk)
        assert 0 <= spill.in_memory <= 3000
    assert most > 0, "nothing was spilled"
    for expected, handle in kept:
        assert torch.equal(handle.take(), expected)
    assert (spill.in_memory, spill.on_disk) == (0, 0)
    spill.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_or_forbidden_is_named(tmp_path):
    spill = Spill(Limits(memory=0, disk=100), str(tmp_path))
    spill.put(torch.zeros(25))
    with pytest.raises(StateError, match=r"above the limits of 0\.00 GB of memory and 0\.00 GB of disk"):
        spill.put(torch.zeros(1))
    with pytest.raises(StateError, match="cannot be written"):
        Spill(Limits(memory=0, disk=100), str(tmp_path / "missing")).put(torch.zeros(1))


def test_limits_from_the_environment(monkeypatch):
    monkeypatch.setenv("FTCOMM_CATCHUP_BYTES", "100")
    monkeypatch.setenv("FTCOMM_CATCHUP_DISK_BYTES", "0")
    assert Limits.from_env() == Limits(100, 0)
    monkeypatch.setenv("FTCOMM_CATCHUP_BYTES", "much")
    with pytest.raises(StateError, match="FTCOMM_CATCHUP_BYTES=much"):
        Limits.from_env()


def draws():
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_a_step_draws_the_same_numbers_again_and_replicas_draw_others():
    group = type("Group", (), {"replica": 1, "shard": 0})
    other = type("Group", (), {"replica": 2, "shard": 0})
    mine, theirs, late = Rng(3, group), Rng(3, other), Rng(9, group)
    mine.begins(5)
    first = draws()
    mine.begins(5)
    assert draws() == first
    for differently in (lambda: mine.begins(6), lambda: theirs.begins(5), lambda: late.begins(5)):
        differently()
        assert all(a != b for a, b in zip(draws(), first, strict=True))
    late.load_state_dict(mine.state_dict())
    late.begins(5)
    assert draws() == first
    together = [Rng(3, member, apart=False) for member in (group, other)]
    drawn = []
    for rng in together:
        rng.begins(5)
        drawn.append(draws())
    assert drawn[0] == drawn[1]


class Alone:
    """A group, for arguments that are refused."""

    replicas, shards = 3, 1
    replica = shard = next_boundary = 0
    internals = SimpleNamespace(outside=False, lag=0, step_loop=None, repeats=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"min_replicas": 4}, "min_replicas=4 in a job of 3 replicas"),
        ({"lr": "cosine"}, "lr='cosine'; expected one of none, linear, sqrt"),
        ({"nan": "ignore"}, "nan='ignore'; expected None"),
        ({"vote": False, "min_replicas": 1}, "vote=False with min_replicas"),
        ({"vote": False, "lr": "sqrt"}, "vote=False with min_replicas, nan or lr"),
        ({"state": {"ftcomm": nn.Linear(1, 1)}}, "`state` has an entry 'ftcomm'"),
        ({"state": {"o": torch.optim.LBFGS(nn.Linear(1, 1).parameters())}}, "no moment for a vote"),
        ({"catchup_mbps": 0.0}, "FTCOMM_CATCHUP_MBPS=0.0"),
    ],
)
def test_arguments_that_cannot_work(arguments, words):
    with pytest.raises((ArgumentError, StateError, SettingsError), match=words):
        StepLoop(arguments.pop("state", None), Alone(), **arguments)
