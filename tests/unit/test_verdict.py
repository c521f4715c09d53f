"""The verdict of `ftcomm why`: each cause is told rightly, from facts that are as a job leaves them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.diagnosis import facts as known_facts
from ftcomm.diagnosis.causes import StallCause, remedy
from ftcomm.diagnosis.facts import JobFacts, LinkFacts, OpFacts, PhaseFacts, Rank, RankFacts, WaitFacts
from ftcomm.diagnosis.processes import ProcessFacts
from ftcomm.diagnosis.stacks import Stacks
from ftcomm.diagnosis.verdict import StallVerdict, judge
from ftcomm.process.stacks import StackFrame, ThreadStack

AT = 1_700_000_000.0
SUM = "allreduce(op='sum') of 300 x float32"
SCRIPT = StackFrame("/home/me/train.py", 31, "step")
LIBRARY = StackFrame("/usr/lib/python3.11/threading.py", 320, "wait")


def process(state: str = "S", **known: Any) -> ProcessFacts:
    return ProcessFacts(pid=4711, state=state, **known)


def stacks(*frames: StackFrame, **known: Any) -> Stacks:
    return Stacks((ThreadStack(4711, "MainThread", frames),) if frames else (), **known)


def op(number: int = 17, on: tuple[Rank, ...] = (), what: str = SUM, group: str = "all", **known: Any) -> OpFacts:
    waits = tuple(WaitFacts(rank, 40.0) for rank in on)
    caller = known.pop("caller", "/home/me/train.py:40 main")
    return OpFacts(group, number, what, 40.0, caller, waits=waits, **known)


def rank(replica: int, *ops: OpFacts, shard: int = 0, **known: Any) -> RankFacts:
    known.setdefault("process", process())
    return RankFacts((replica, shard), host=f"10.0.0.{replica}", ops=ops, **known)


def job(*ranks: RankFacts, **known: Any) -> JobFacts:
    return JobFacts(AT, "run", len(ranks), ranks=ranks, op_floor=30, op_timeout=120, grace=5, **known)


def waiting_for(culprit: RankFacts, **known: Any) -> JobFacts:
    """Replicas 0 and 1 wait for replica 2."""
    return job(rank(0, op(on=((2, 0),))), rank(1, op(on=((2, 0),))), culprit, **known)


def words(verdict: StallVerdict) -> str:
    return " ".join(verdict.sentences(AT))


def expect(facts: JobFacts, cause: StallCause, culprits: tuple[Rank, ...], *said: str) -> StallVerdict:
    verdict = judge(facts)
    assert StallCause(verdict.cause) is cause, words(verdict)
    assert verdict.culprits == culprits, words(verdict)
    for each in said:
        assert each in words(verdict)
    assert remedy(cause) in words(verdict)
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=StallVerdict) == verdict
    return verdict


def test_its_own_code() -> None:
    done = op(16, open=False)
    facts = waiting_for(rank(2, done, stacks=stacks(LIBRARY, SCRIPT)))
    said = "train.py:31 step", "op 17", "train.py:40", "Replica 0 and replica 1 wait"
    verdict = expect(facts, StallCause.OWN_CODE, ((2, 0),), *said)
    assert verdict.since == AT - 40
    assert verdict.removal == (AT - 40 + 35, AT - 40 + 125)
    assert verdict.lines == (str(SCRIPT),)


def test_a_rank_that_holds_its_interpreter_is_said_to() -> None:
    expect(waiting_for(rank(2, stacks=stacks(SCRIPT, held=True))), StallCause.OWN_CODE, ((2, 0),), "interpreter lock")


def test_a_rank_whose_stacks_are_unknown_is_named_by_its_last_call() -> None:
    facts = waiting_for(rank(2, op(16, open=False), stacks=stacks(missing="no thread has answered")))
    expect(facts, StallCause.OWN_CODE, ((2, 0),), "after its call at /home/me/train.py:40", "no thread has answered")


def test_never_joined() -> None:
    facts = job(
        rank(0, phase="join", phase_age=12.0),
        rank(1, began=False, stacks=stacks(SCRIPT)),
        rank(2, began=False, process=None, reason="exit code 1"),
        forming=True,
    )
    verdict = expect(facts, StallCause.NEVER_JOINED, ((1, 0), (2, 0)), "ftcomm.init()", "train.py:31", "Replica 0")
    assert verdict.since == AT - 12


@pytest.mark.parametrize("column", [0, -1])
def test_a_deadlock_of_two_groups_names_both_lines(column: int) -> None:
    facts = job(
        rank(0, op(3, on=((1, 0),), group="a", caller="train.py:7 f", column=column)),
        rank(1, op(8, on=((0, 0),), group="b", caller="train.py:9 g", column=column)),
        rank(2, op(5, on=((0, 0), (1, 0)), group="all")),
    )
    verdict = expect(facts, StallCause.OTHER_GROUP, verdict_of_two(facts), "train.py:7 f", "train.py:9 g", "'a'", "'b'")
    assert set(verdict.lines) == {"train.py:7 f", "train.py:9 g"}


def verdict_of_two(facts: JobFacts) -> tuple[Rank, ...]:
    culprits = judge(facts).culprits
    assert set(culprits) == {(0, 0), (1, 0)}
    return culprits


def phase(kind: str, on: tuple[Rank, ...], group: str = "", left: float = 80.0, **known: Any) -> PhaseFacts:
    waits = tuple(WaitFacts(rank, 40.0) for rank in on)
    return PhaseFacts(kind, f"the {kind}", group, 7, "/home/me/train.py:50 f", left, waits, **known)


def test_a_vote_inside_a_replica_to_which_a_rank_does_not_come() -> None:
    busy = rank(0, shard=2, stacks=stacks(SCRIPT))
    waits = [rank(0, phases=(phase("meet", ((0, on),)),), shard=shard) for shard, on in ((0, 2), (1, 0))]
    alone = expect(job(*waits, busy), StallCause.OWN_CODE, ((0, 2),), "train.py:31", "in the meet", "train.py:50")
    assert (alone.removal, alone.gives_up) == (None, (AT + 80, "the meet")), "no other replica waits for this one"
    assert "fails at" in words(alone)
    tree = [rank(0, phases=(phase("meet", ((0, on),)),), shard=shard) for shard, on in ((3, 1), (4, 3), (1, 0))]
    expect(job(*waits[:1], *tree, busy), StallCause.OWN_CODE, ((0, 2),), "train.py:31", "in the meet")
    facts = job(*waits, busy, rank(1, op(on=((0, 2),)), shard=2), rank(1, op(on=((0, 0),))))
    others = expect(facts, StallCause.OWN_CODE, ((0, 2),), "what holds them up is removed")
    assert others.removal == (AT - 40 + 35, AT - 40 + 125)


def test_a_boundary_to_which_a_rank_of_another_replica_does_not_come() -> None:
    facts = job(
        rank(0, phases=(phase("stand", ((1, 0),)),)),
        rank(1, phases=(phase("stand", ((1, 1),)),)),
        rank(1, shard=1, stacks=stacks(SCRIPT)),
    )
    verdict = expect(facts, StallCause.OWN_CODE, ((1, 1),), "train.py:31", "at the stand", "what holds them up is")
    assert verdict.removal is not None


def test_a_rank_that_has_come_to_the_same_boundary_and_goes_no_further_is_ours_to_look_at() -> None:
    facts = job(rank(0, phases=(phase("stand", ((1, 0),)),)), rank(1, phases=(phase("stand", ()),)))
    expect(facts, StallCause.INSIDE, ((1, 0),))


def test_a_message_that_is_not_sent() -> None:
    facts = job(rank(0, phases=(phase("recv", ((1, 0),), "0"),)), rank(1, stacks=stacks(SCRIPT)))
    verdict = expect(facts, StallCause.OWN_CODE, ((1, 0),), "train.py:31", "waits in the recv", "fails at")
    assert (verdict.since, verdict.removal) == (AT - 40, None)


def test_a_rank_that_waits_for_a_message_is_removed_in_place_of_who_does_not_send_it() -> None:
    receives = rank(1, phases=(phase("recv", ((2, 0),), "1", left=300.0),))
    facts = job(rank(0, op(on=((1, 0),))), receives, rank(2, stacks=stacks(SCRIPT)))
    verdict = expect(facts, StallCause.OWN_CODE, ((2, 0),), "train.py:31", "replica 1 is removed")
    assert verdict.gives_up is None, "the removal comes first"


@pytest.mark.parametrize("other", ["recv", "send", "op"])
def test_messages_that_wait_for_each_other(other: str) -> None:
    waits = (op(on=((0, 0),)),) if other == "op" else ()
    phases = () if waits else (phase(other, ((0, 0),), "1"),)
    facts = job(rank(0, phases=(phase("recv", ((1, 0),), "0"),)), rank(1, *waits, phases=phases))
    verdict = judge(facts)
    assert (verdict.cause, set(verdict.culprits)) == (StallCause.DEADLOCK.value, {(0, 0), (1, 0)})
    assert "/home/me/train.py:50 f" in verdict.lines


def test_a_message_from_anybody_names_all_who_could_send_it() -> None:
    waits = rank(0, phases=(phase("recv", ((1, 0), (2, 0)), "0"),))
    facts = job(waits, rank(1, stacks=stacks(SCRIPT)), rank(2, process=process("T")))
    expect(facts, StallCause.FROZEN, ((1, 0), (2, 0)), "None of these has sent", "train.py:31", "SIGSTOP")
    waiting = rank(2, op(on=((0, 0),)))
    expect(job(waits, rank(1, stacks=stacks(SCRIPT)), waiting), StallCause.OWN_CODE, ((1, 0),), "train.py:31")


@pytest.mark.parametrize(
    "file",
    [
        "/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py",
        "/venv/lib/python3.11/site-packages/torchdata/nodes/loader.py",
    ],
)
def test_a_data_loader(file: str) -> None:
    frames = LIBRARY, StackFrame(file, 1284, "_get_data"), SCRIPT
    expect(waiting_for(rank(2, stacks=stacks(*frames))), StallCause.DATA_LOADER, ((2, 0),), "input", "train.py:31")


@pytest.mark.parametrize(
    "file",
    [
        "/venv/lib/python3.11/site-packages/torch/_inductor/compile_fx.py",
        "/venv/lib/python3.11/site-packages/triton/compiler/compiler.py",
        "/venv/lib/python3.11/site-packages/torch/utils/cpp_extension.py",
    ],
)
def test_compilation(file: str) -> None:
    facts = waiting_for(rank(2, stacks=stacks(LIBRARY, StackFrame(file, 9, "compile"), SCRIPT)))
    expect(facts, StallCause.COMPILATION, ((2, 0),), "compiles", "train.py:31")
    collects = msgspec.structs.replace(facts.ranks[2], collecting=0.9)  # a compiler makes many objects
    expect(job(*facts.ranks[:2], collects), StallCause.COMPILATION, ((2, 0),))


def test_an_import_of_a_compiler_is_no_compilation() -> None:
    frame = StackFrame("/venv/lib/python3.11/site-packages/torch/_inductor/config.py", 3, "<module>")
    expect(waiting_for(rank(2, stacks=stacks(frame, SCRIPT))), StallCause.OWN_CODE, ((2, 0),), "train.py:31")


@pytest.mark.parametrize(("state", "said"), [("T", "SIGSTOP"), ("t", "debugger")])
def test_a_frozen_process(state: str, said: str) -> None:
    facts = waiting_for(rank(2, op(16, open=False), process=process(state)))
    expect(facts, StallCause.FROZEN, ((2, 0),), "frozen", "4711", said, "after its call")


def test_a_process_that_was_frozen_inside_the_op() -> None:
    """Its waits do not grow, so it waits for nobody."""
    expect(waiting_for(rank(2, op(), process=process("T"))), StallCause.FROZEN, ((2, 0),))


def test_a_dead_host() -> None:
    gone = [rank(2, reached=False, process=None), rank(3, reached=False, process=None)]
    gone = [msgspec.structs.replace(each, host="10.0.0.2") for each in gone]
    facts = job(rank(0, op(on=((2, 0), (3, 0)))), rank(1, op(on=((3, 0),))), *gone)
    expect(facts, StallCause.DEAD_HOST, ((2, 0), (3, 0)), "10.0.0.2")


def test_a_process_that_has_ended() -> None:
    expect(waiting_for(rank(2, process=None, reason="exit code 1")), StallCause.ENDED, ((2, 0),), "exit code 1")


def circle(*links: LinkFacts, **of_rank: Any) -> JobFacts:
    """All three are in one op, and each waits for the others."""
    everybody = [(0, 0), (1, 0), (2, 0)]
    ranks = [rank(r, op(on=tuple(x for x in everybody if x[0] != r)), **of_rank) for r in range(3)]
    return job(*ranks, links=links)


def lost(sender: int, receiver: int, **known: Any) -> LinkFacts:
    return LinkFacts((sender, 0), (receiver, 0), **{"waiting": 9000, "retries": 5, "lost": 6, **known})


def test_a_network_that_is_cut_both_ways() -> None:
    expect(circle(lost(0, 2), lost(2, 0)), StallCause.CUT, ((0, 0), (2, 0)), "replica 0 and replica 2", "both ways")


def test_a_replica_that_is_cut_off_from_all() -> None:
    links = lost(0, 2), lost(2, 0), lost(1, 2), lost(2, 1)
    said = "replica 2 (10.0.0.2) and replica 0 and replica 1 do not"
    assert expect(circle(*links), StallCause.CUT, ((2, 0),), said).sure

    coordinator = known_facts.COORDINATOR
    quiet = LinkFacts(coordinator, (2, 0), lost=0)
    assert not expect(circle(*links, quiet), StallCause.CUT, ((2, 0),), said).sure, "its host may be dead"
    answers = LinkFacts((2, 0), coordinator, lost=0, arrived=1)
    assert expect(circle(*links, quiet, answers), StallCause.CUT, ((2, 0),), said).sure
    beats = LinkFacts((2, 0), coordinator, lost=0, heard=known_facts.JobFacts(0).presence / 2)
    assert expect(circle(*links, quiet, beats), StallCause.CUT, ((2, 0),), said).sure
    silent = msgspec.structs.replace(beats, heard=known_facts.JobFacts(0).presence)
    assert not expect(circle(*links, quiet, silent), StallCause.CUT, ((2, 0),), said).sure


def test_a_cut_is_told_also_when_who_was_cut_off_has_been_removed() -> None:
    cut = circle(lost(0, 2), lost(2, 0))
    over = msgspec.structs.replace(job(*(rank(replica) for replica in range(3))), earlier=cut)
    expect(over, StallCause.CUT, ((0, 0), (2, 0)), "both ways")
    others = msgspec.structs.replace(waiting_for(rank(1)), earlier=cut)  # the others wait by now for who notices
    expect(others, StallCause.CUT, ((0, 0), (2, 0)), "both ways")
    for well in (circle(), waiting_for(rank(2))):  # what was no cut is over
        expect(msgspec.structs.replace(over, earlier=well), StallCause.NONE, ())


def test_a_stall_is_told_also_when_its_cause_was_removed_within_the_look() -> None:
    culprit = rank(2, process=process("R"), collecting=0.9, stacks=stacks(SCRIPT))
    stall = waiting_for(culprit)
    went_on = [rank(replica, op(17, open=False, epoch=1), op(18, on=((1, 0),), epoch=1)) for replica in (0, 1)]
    over = msgspec.structs.replace(job(*went_on, culprit), earlier=stall)
    expect(over, StallCause.GARBAGE, ((2, 0),), "train.py:31 step")
    dead = msgspec.structs.replace(over, earlier=waiting_for(rank(2, process=None)))
    assert judge(dead).culprits != ((2, 0),), "why it has ended is known"
    short = msgspec.structs.replace(over, earlier=msgspec.structs.replace(stall, op_floor=60))
    assert judge(short).culprits != ((2, 0),), "it was no stall"


def test_a_network_that_is_cut_one_way() -> None:
    """Both sides send again, since of one the data do not arrive, and of the other the acknowledgements."""
    facts = circle(lost(0, 2), lost(2, 0, lost=0))
    expect(facts, StallCause.CUT_ONE_WAY, ((0, 0), (2, 0)), "what replica 0 sends does not reach replica 2")


def test_a_host_that_the_coordinator_does_not_reach_either_is_dead() -> None:
    coordinator = known_facts.COORDINATOR[0]
    links = lost(0, 2), lost(2, 0), lost(coordinator, 2), lost(2, coordinator)
    expect(circle(*links), StallCause.DEAD_HOST, ((2, 0),), "10.0.0.2", "does not answer")
    one_way = circle(lost(0, 2), lost(2, 0, lost=0), lost(coordinator, 2), lost(2, coordinator, lost=0))
    expect(one_way, StallCause.CUT_ONE_WAY, ((0, 0), (2, 0)))


def test_whom_nobody_reaches_is_not_judged_by_what_it_does() -> None:
    apart = msgspec.structs.replace(waiting_for(rank(2, stacks=stacks(SCRIPT))), links=(lost(0, 2), lost(2, 0)))
    expect(apart, StallCause.CUT, ((0, 0), (2, 0)))


def test_who_has_gone_on_without_a_dead_host_is_not_what_that_waits_for() -> None:
    """It was removed and cannot hear of it, and its connections have nothing under way."""
    went_on = tuple(rank(replica, op(17, open=False, epoch=2), op(18, open=False, epoch=2)) for replica in (0, 1))
    expect_none(job(*went_on, rank(2, op(17, on=((0, 0), (1, 0)), epoch=1), member=False)))
    late = rank(2, op(18, on=((1, 0),), epoch=2))
    expect(job(*went_on, late), StallCause.OWN_CODE, ((1, 0),))  # in the same view it does wait


def expect_none(facts: JobFacts) -> None:
    assert StallCause(judge(facts).cause) is StallCause.NONE, words(judge(facts))


def test_ranks_that_others_have_started_are_not_said_to_be_well() -> None:
    verdict = judge(job(*(rank(replica, reached=False, process=None) for replica in range(3))))
    assert StallCause(verdict.cause) is StallCause.UNKNOWN
    assert "has not started the ranks" in words(verdict)


def test_a_slow_network() -> None:
    slow = LinkFacts((0, 0), (2, 0), waiting=4_000_000, lost=1, rate=2e5)
    fast = LinkFacts((0, 0), (1, 0), waiting=4_000_000, lost=0, rate=2e9)
    expect(circle(fast, slow), StallCause.SLOW_NETWORK, ((0, 0), (2, 0)), "from replica 0 to replica 2", "0.2 MB/s")


def test_mismatch_of_calls() -> None:
    other = op(what="allreduce(op='sum') of 301 x float32", caller="train.py:9 g")
    facts = job(rank(0, op()), rank(1, op()), rank(2, other))
    expect(facts, StallCause.MISMATCH, ((2, 0),), "300 x float32", "301 x float32", "train.py:9 g")


def test_the_last_mismatch_counts_and_one_that_is_over_does_not() -> None:
    def failed(number: int, age: float, *whats: str) -> JobFacts:
        made = [msgspec.structs.replace(op(number, what=what, open=False, failed=True), age=age) for what in whats]
        return job(*(rank(replica, each) for replica, each in enumerate(made)))

    other = SUM.replace("300", "301")
    old, new = failed(5, 3.0, SUM, SUM, other), failed(9, 1.0, other, SUM, SUM)
    both = [msgspec.structs.replace(a, ops=a.ops + b.ops) for a, b in zip(old.ranks, new.ranks, strict=True)]
    expect(job(*both), StallCause.MISMATCH, ((0, 0),), "op 9")
    assert judge(failed(5, 60.0, SUM, SUM, other)).cause == StallCause.NONE.value


def test_a_stall_that_has_begun_after_a_mismatch_is_told() -> None:
    def failed(age: float, what: str = SUM) -> OpFacts:
        return msgspec.structs.replace(op(5, what=what, open=False, failed=True), age=age)

    def facts(age: float) -> JobFacts:
        waits, other = op(on=((2, 0),)), SUM.replace("300", "301")
        return job(rank(0, failed(age), waits), rank(1, failed(age), waits), rank(2, failed(age, other)))

    expect(facts(9.0), StallCause.MISMATCH, ((2, 0),))  # all wait for 40 s: it is why
    waited = [msgspec.structs.replace(r, ops=tuple(since(o, 3.0) for o in r.ops)) for r in facts(9.0).ranks]
    expect(job(*waited), StallCause.OWN_CODE, ((2, 0),))


def since(op: OpFacts, seconds: float) -> OpFacts:
    return msgspec.structs.replace(op, waits=tuple(WaitFacts(wait.rank, seconds) for wait in op.waits))


def test_ops_that_ended_well_are_no_mismatch() -> None:
    facts = job(rank(0, op(open=False)), rank(1, op(what="barrier", open=False)))
    assert judge(facts).cause == "none"


@pytest.mark.parametrize("behind", [False, True])
def test_a_swapped_order_of_ops(behind: bool) -> None:
    a, b = "allreduce(op='sum') of 8 x float32", "allgather() of 2 x int64"
    second = {0: (op(18, what=b),), 2: (op(18, what=a),)} if behind else {0: (), 2: ()}
    facts = job(
        rank(0, op(17, what=a, failed=True), *second[0]),
        rank(1, op(17, what=a, failed=True), op(18, what=b)),
        rank(2, op(17, what=b, failed=True, caller="train.py:9 g"), *second[2]),
    )
    expect(facts, StallCause.SWAPPED, ((2, 0),), "another order", "train.py:9 g")


def test_the_garbage_collector() -> None:
    expect(waiting_for(rank(2, collecting=0.9, stacks=stacks(SCRIPT))), StallCause.GARBAGE, ((2, 0),), "90%", ":31")
    expect(waiting_for(rank(2, stacks=stacks(held=True, collects=9.0))), StallCause.GARBAGE, ((2, 0),))


def test_a_rank_without_a_cpu() -> None:
    starved = process("R", ran=0.05, delayed=0.9)
    facts = waiting_for(rank(2, process=starved, stacks=stacks(SCRIPT), idle=40.0, step=0.8))
    expect(facts, StallCause.STARVED, ((2, 0),), "90%")


def test_a_rank_that_sleeps_is_not_without_a_cpu_though_its_threads_are() -> None:
    asleep = process("S", starved=0.9)
    facts = waiting_for(rank(2, process=asleep, stacks=stacks(SCRIPT), idle=40.0, step=0.8))
    expect(facts, StallCause.OWN_CODE, ((2, 0),), "train.py:31")


def test_a_loop_without_end_on_a_busy_machine_is_its_own_code() -> None:
    """In the time that it has had, it would have come to its next op long ago."""
    busy = process("R", ran=0.1, delayed=0.9)
    facts = waiting_for(rank(2, process=busy, stacks=stacks(SCRIPT), idle=40.0, step=0.02))
    expect(facts, StallCause.OWN_CODE, ((2, 0),), "train.py:31")


def test_a_full_disk() -> None:
    full = process("S", full=("/scratch/run",))
    facts = waiting_for(rank(2, process=full, stacks=stacks(SCRIPT)))
    expect(facts, StallCause.FULL_DISK, ((2, 0),), "/scratch/run", "train.py:31")


def test_a_rank_that_has_called_and_does_not_go_on() -> None:
    expect(waiting_for(rank(2, op(), stacks=stacks(SCRIPT))), StallCause.INSIDE, ((2, 0),))


def test_waits_lead_through_other_ranks_of_a_replica() -> None:
    """Rank 0 of replica 1 waits for rank 1 of it, which is in its own code."""
    facts = job(
        rank(0, op(on=((1, 0),))),
        rank(1, op(2, on=((1, 1),), group="mine", column=-1)),
        rank(1, shard=1, stacks=stacks(SCRIPT)),
    )
    expect(facts, StallCause.OWN_CODE, ((1, 1),), "Replica 1 shard 1 is in its own code")


def test_nobody_waits() -> None:
    short = OpFacts("all", 17, SUM, 0.2, waits=(WaitFacts((1, 0), 0.2),))
    assert judge(job(rank(0, short), rank(1))).cause == "none"


RANKS = st.tuples(st.integers(0, 3), st.integers(0, 1))
OPS = st.builds(
    OpFacts,
    group=st.sampled_from(["all", "a", "b"]),
    number=st.integers(0, 2),
    what=st.sampled_from([SUM, "barrier"]),
    age=st.floats(0, 100),
    open=st.booleans(),
    failed=st.booleans(),
    column=st.integers(-2, 1),
    waits=st.lists(st.builds(WaitFacts, rank=RANKS, seconds=st.floats(0, 100)), max_size=3).map(tuple),
)
PHASES = st.builds(
    PhaseFacts,
    kind=st.sampled_from(["stand", "meet", "send", "recv"]),
    named=st.just("it"),
    group=st.sampled_from(["0", "1"]),
    number=st.integers(0, 1),
    left=st.floats(0, 100),
    waits=st.lists(st.builds(WaitFacts, rank=RANKS, seconds=st.floats(0, 100)), max_size=3).map(tuple),
)
PROCESSES = st.none() | st.builds(
    ProcessFacts,
    pid=st.just(4711),
    state=st.sampled_from("RSDTtZ"),
    ran=st.floats(0, 1),
    delayed=st.floats(0, 1),
    full=st.sampled_from([(), ("/x",)]),
)
FACTS = st.builds(
    RankFacts,
    rank=RANKS,
    reached=st.booleans(),
    began=st.booleans(),
    process=PROCESSES,
    stacks=st.sampled_from([stacks(), stacks(SCRIPT), stacks(LIBRARY, held=True), stacks(missing="x")]),
    collecting=st.floats(0, 1),
    ops=st.lists(OPS, max_size=3).map(tuple),
    phases=st.lists(PHASES, max_size=2).map(tuple),
)
LINKS = st.builds(
    LinkFacts,
    sender=RANKS,
    receiver=RANKS,
    waiting=st.integers(0, 9),
    retries=st.integers(0, 9),
    lost=st.none() | st.integers(0, 9),
    rate=st.floats(0, 9),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(FACTS, max_size=6, unique_by=lambda each: each.rank), st.lists(LINKS, max_size=4), st.booleans())
def test_any_facts_have_a_verdict_as_text(ranks: list[RankFacts], links: list[LinkFacts], forming: bool) -> None:
    facts = JobFacts(AT, ranks=tuple(ranks), links=tuple(links), forming=forming)
    verdict = judge(facts)
    cause = StallCause(verdict.cause)
    assert all(verdict.sentences(AT))
    assert judge(facts) == verdict
    if cause in (StallCause.NONE, StallCause.MISMATCH, StallCause.SWAPPED, StallCause.NEVER_JOINED):
        return
    if cause is StallCause.UNKNOWN and not any(each.reached for each in ranks):
        return  # nobody knows more
    assert verdict.culprits
    waits = {each.rank: {w.rank for o in each.inside for w in o.waits if w.seconds >= 0.5} for each in ranks}
    awaited = set().union(*waits.values())
    assert set(verdict.culprits) & awaited, "nobody waits for whom it names"
