"""The parts of the launcher that need no process: decisions, lines, texts, options."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.errors import FtcommError
from ftcomm.launch import output, policy
from ftcomm.launch.admin.client import AdminClient, JobEnded
from ftcomm.launch.coordinator.command import CoordinatorOptions
from ftcomm.launch.event_text import describe, replicas
from ftcomm.launch.options import RunOptions
from ftcomm.launch.output import HELD, Console, LineSplitter, LogFile, prefix
from ftcomm.launch.policy import (
    HEALTHY,
    WINDOW,
    GiveUp,
    JobLost,
    Restart,
    Restarts,
    State,
    after_death,
    how_it_ended,
    signal_name,
)
from ftcomm.launch.removed_replicas import Timers
from ftcomm.launch.replica_processes import ReplicaListener, ReplicaProcesses, rank_environment
from ftcomm.launch.run import Launcher
from ftcomm.launch.several_hosts.node_place import NodePlace
from ftcomm.settings import Settings

RUNNING, WAITING, FINISHED, FAILED = State.RUNNING, State.WAITING, State.FINISHED, State.FAILED


def decide(*others: State, restarts: Restarts = Restarts(), **changes: Any) -> Restart | GiveUp | JobLost:  # noqa: B008
    arguments: dict[str, Any] = {
        "code": -9,
        "said_finished": False,
        "began": True,
        "max_restarts": 3,
        "min_replicas": 1,
        "backoff": 0.5,
        "backoff_limit": 30.0,
        **changes,
    }
    return after_death(dict(enumerate(others)), restarts=restarts, now=1000.0, **arguments)


def test_a_replica_is_restarted_while_another_runs() -> None:
    assert decide(RUNNING, WAITING, FAILED) == Restart(0.5, 1, Restarts((1000.0,), 1))


@pytest.mark.parametrize("others", [(), (WAITING,), (FAILED,), (WAITING, FAILED)])
def test_with_nobody_running_the_job_is_lost(others: tuple[State, ...]) -> None:
    decision = decide(*others)
    assert isinstance(decision, JobLost)
    assert "last checkpoint" in decision.reason


def test_before_the_first_view_there_is_nothing_to_restore() -> None:
    decision = decide(WAITING, began=False)
    assert isinstance(decision, JobLost)
    assert "checkpoint" not in decision.reason
    assert "output says why" in decision.reason


@pytest.mark.parametrize("others", [(FINISHED,), (FINISHED, WAITING), (FINISHED, FAILED)])
def test_no_restart_when_the_others_have_ended(others: tuple[State, ...]) -> None:
    decision = decide(*others)
    assert isinstance(decision, GiveUp)
    assert "no replica to catch up from" in decision.reason


def test_no_restart_of_one_whose_training_was_over() -> None:
    decision = decide(RUNNING, said_finished=True)
    assert isinstance(decision, GiveUp)
    assert "had finished" in decision.reason


def test_an_exit_code_is_a_failure_whatever_was_said() -> None:
    """A script that ends by sys.exit(1) says at its exit that it has finished, in the middle of the training too."""
    assert decide(RUNNING, said_finished=True, code=1) == Restart(0.5, 1, Restarts((1000.0,), 1))
    assert isinstance(decide(RUNNING, said_finished=True, code=1, max_restarts=0), GiveUp)


def test_restarts_run_out_and_come_back_with_time() -> None:
    restarts = Restarts((1.0, 500.0, 900.0), 3)
    decision = decide(RUNNING, restarts=restarts.after(1000.0, 1.0))
    assert decision == GiveUp("it was restarted 3 times within an hour (--max-restarts)")
    assert decide(RUNNING, restarts=restarts.after(1.0 + WINDOW, 1.0)) == Restart(
        4.0, 3, Restarts((500.0, 900.0, 1000.0), 4)
    )
    assert decide(RUNNING, max_restarts=0) == GiveUp("restarts are switched off (--max-restarts 0)")


def test_too_few_replicas_end_the_job() -> None:
    assert isinstance(decide(RUNNING, RUNNING, max_restarts=0, min_replicas=2), GiveUp)
    decision = decide(RUNNING, FAILED, max_restarts=0, min_replicas=2)
    assert isinstance(decision, JobLost)
    assert "--min-replicas 2" in decision.reason


def test_the_back_off_doubles_to_its_limit_and_is_reset_by_a_healthy_minute() -> None:
    restarts, delays = Restarts(), []
    for at in range(8):
        restarts = restarts.after(float(at), 1.0)
        delays.append(restarts.delay(0.5, 30.0))
        restarts = restarts.another(float(at))
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert restarts.after(100.0, HEALTHY).delay(0.5, 30.0) == 0.5
    assert Restarts((), 10**6).delay(0.5, 30.0) == 30.0


def test_text_for_exit_codes() -> None:
    assert how_it_ended(3) == "exited with code 3"
    assert how_it_ended(-9) == "was killed by SIGKILL"
    assert how_it_ended(-37) == "was killed by signal 37"
    assert signal_name(0) is None


# -- lines -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\r", b"\n")), max_size=12))
def test_lines_do_not_depend_on_how_the_bytes_come(pieces: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece, 0.0)] + splitter.flush()
    whole = b"".join(pieces).split(b"\n")
    assert lines == (whole if whole[-1] else whole[:-1])
    assert splitter.flush() == []


@given(st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\r\n"]), max_size=30))
def test_text_before_a_line_end_is_never_lost(pieces: list[bytes]) -> None:
    """With \\r\\n as with \\n, whatever the cuts; a lone \\r may replace what was before it."""
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece, 0.0)] + splitter.flush()
    shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in b"".join(pieces).split(b"\n")]
    redrawn = iter(lines)
    assert all(any(line == wanted for line in redrawn) for wanted in shown if wanted)
    assert all(b"\r" not in line and b"\n" not in line for line in lines)


def test_a_progress_bar_is_shown_once_a_second_and_at_its_end() -> None:
    splitter = LineSplitter()
    shown = [splitter.feed(b"\r%d%%" % percent, percent / 10) for percent in range(25)]
    assert [line for lines in shown for line in lines] == [b"0%", b"10%", b"20%"]
    assert splitter.feed(b"\r100%\n", 2.5) == [b"100%"]


def test_a_line_without_end_is_cut_into_pieces() -> None:
    splitter = LineSplitter()
    data = b"x" * (LineSplitter.LONGEST * 2 + 5)
    lines = [line for start in range(0, len(data), 65536) for line in splitter.feed(data[start : start + 65536], 0.0)]
    assert [len(line) for line in [*lines, *splitter.flush()]] == [LineSplitter.LONGEST, LineSplitter.LONGEST, 5]


def test_prefix() -> None:
    assert prefix(2, 0, 1, colour=False) == b"[2] "
    assert prefix(2, 1, 4, colour=False) == b"[2.1] "
    assert prefix(0, 0, 1, colour=True) != prefix(1, 0, 1, colour=True)
    assert prefix(0, 0, 1, colour=True).endswith(b"[0]\033[0m ")


class SlowStream:
    """A terminal that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.text = ""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError

    def write(self, text: str) -> None:
        assert self.go.wait(30)
        self.text += text

    def flush(self) -> None:
        pass


def test_a_blocked_terminal_holds_the_ranks_and_not_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SlowStream()
    monkeypatch.setattr("sys.stdout", stream)
    line = b"x" * 1023
    count = 2 * HELD // 1024

    async def main() -> None:
        held: list[bool] = []
        released = asyncio.Event()

        def hold(value: bool) -> None:
            held.append(value)
            if not value:
                released.set()

        console = Console(asyncio.get_running_loop(), hold)
        for _ in range(count):
            console.write(1, line)  # returns, though nothing is taken
        assert held == [True]
        stream.go.set()
        await asyncio.wait_for(released.wait(), 30)
        assert held == [True, False]
        await asyncio.to_thread(console.close, 30.0)

    asyncio.run(main())
    assert stream.text == (line.decode() + "\n") * count


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
def test_a_terminal_that_is_paused_for_long_costs_lines_and_no_rank(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that cannot print comes to no op, and would be removed as a stall."""
    monkeypatch.setattr(output, "HOLD_TIMEOUT", 0.01)
    out, err = SlowStream(), SlowStream()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    line, count = b"x" * 1023, 2 * HELD // 1024

    async def main() -> None:
        go_on = asyncio.Event()
        console = Console(asyncio.get_running_loop(), lambda held: None if held else go_on.set())
        for _ in range(count):
            console.write(1, line)
        await asyncio.wait_for(go_on.wait(), 30)  # though nothing is taken
        for _ in range(count):
            console.write(1, line)
        err.go.set()
        if ends:
            threading.Timer(0.1, out.go.set).start()
            await asyncio.to_thread(console.close, 30.0)
            return
        out.go.set()
        while not err.text:
            await asyncio.sleep(0.01)
        console.write(1, b"later")
        await asyncio.to_thread(console.close, 30.0)

    asyncio.run(main())
    assert out.text.count("\n") == count + (not ends)
    assert f"{count} lines were left out" in err.text
    assert ends or out.text.endswith("later\n")


def test_a_console_whose_reader_went_away_drops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(SlowStream):
        def write(self, text: str) -> None:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Broken())

    async def main() -> None:
        console = Console(asyncio.get_running_loop(), lambda held: None)
        console.write(1, b"one")
        console.write(1, b"two")
        await asyncio.to_thread(console.close, 30.0)

    asyncio.run(main())


def test_a_log_file_tells_its_trouble_once(tmp_path: Path) -> None:
    told: list[str] = []
    log = LogFile(tmp_path / "absent" / "log", told.append)
    log.write(b"one")
    log.close()
    assert len(told) == 1
    assert "No such file" in told[0]
    full = LogFile(Path("/dev/full"), told.append)
    full.write(b"one")
    full.write(b"two")
    assert len(told) == 2
    assert "No space left" in told[1]


# -- texts and options -----------------------------------------------------------------------------------------------


def test_text_for_events() -> None:
    members = [{"replica": 3, "contributing": False}, *({"replica": r, "contributing": True} for r in (0, 1))]
    view = {"kind": "view", "epoch": 4, "step": 12, "members": members, "why": "join 3"}
    assert describe(view) == "view 4 from step 12: replicas 0, 1, and catching up replica 3 (join 3)"
    assert describe({"kind": "view", "epoch": 5, "step": None, "members": [], "why": ""}) == "view 5: nobody"
    assert describe({"kind": "report", "replica": 0, "loss": 1.0}) is None
    pauses = {"kind": "training_pauses", "replica": 0, "shard": 0, "step": 7, "contributing": 1, "least": 2}
    assert describe(pauses) == "training pauses before step 7: 1 of at least 2 replicas contribute"
    assert describe({"kind": "training_goes_on", "step": 7, "seconds": 1.5}) == (
        "training goes on with step 7 after 1.5 s"
    )
    failed = {"kind": "step_failed", "replica": 2, "shard": 1, "step": 3, "error": "OutOfMemoryError: no room"}
    assert describe(failed) == "replica 2 shard 1 failed in step 3: OutOfMemoryError: no room"
    assert describe({"kind": "step_discarded", "step": 3, "decision": "repeat"}) == "step 3 is repeated, by vote"
    assert describe({"kind": "step_discarded", "step": 3, "decision": "skip"}) == "step 3 has no update, by vote"
    assert describe({"kind": "suspect", "replica": 1, "reason": "it died", "by": 0}) == (
        "replica 1 is suspected by 0: it died"
    )
    assert describe({"kind": "removed", "replica": 1, "reason": "silent"}) == (
        "replica 1 was removed, and its process may live: it ends when it hears of that"
    )
    alone = "none of the replicas that contribute is heard: this coordinator itself may be cut off, so it waits"
    assert describe({"kind": "cut_off", "reason": alone}) == alone
    holds = (
        "no other replica holds the state of the training, and it is not proved that its process has ended (1: silent)"
    )
    waited = describe({"kind": "postponed", "replica": 1, "reason": "restarted"})
    assert waited is not None
    assert waited.startswith("replica 1 is lost (restarted), and with it maybe the job")
    assert describe({"kind": "not_removed", "replica": 1, "reason": holds}) == f"replica 1 is not given up: {holds}"
    assert replicas([2]) == "replica 2"
    assert replicas([2, 0]) == "replicas 0, 2"
    json.dumps(view)


def test_options_find_modules_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "launched"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    (package / "__main__.py").write_text("")
    (package / "train.py").write_text("")
    (tmp_path / "plain" / "below").mkdir(parents=True)  # namespace packages
    (tmp_path / "plain" / "below" / "train.py").write_text("")
    for module in ("launched", "launched.train", "plain.below.train", "json.tool", "ftcomm.control.views"):
        options = RunOptions(replicas=1, script=module, module=True, args=("-x",))
        options.check()
        assert options.command()[1:] == ["-u", "-m", module, "-x"]


def test_secrets_are_in_no_repr() -> None:
    assert "secret" not in repr(CoordinatorOptions(replicas=1, token="a-secret"))
    assert "secret" not in repr(RunOptions(replicas=1, script="x.py", env={"FTCOMM_TOKEN": "a-secret"}))


def test_ranks_do_not_get_the_token_of_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOMM_DASHBOARD_TOKEN", "the-token-of-a-live-view")
    monkeypatch.setenv("OF_THE_SCRIPT", "1")
    environment = rank_environment(RunOptions(replicas=1, script="x.py"), "127.0.0.1:1", "token", "job", "127.0.0.1:2")
    assert "the-token-of-a-live-view" not in environment.values()
    assert (environment["OF_THE_SCRIPT"], environment["FTCOMM_TOKEN"]) == ("1", "token")


def test_ranks_get_the_times_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCOMM_INIT_TIMEOUT", "7")  # of another launcher around us, or read by the command line already
    options = RunOptions(replicas=1, script="x.py", op_timeout=40.0, init_timeout=33.0)
    settings = Settings.from_env(
        {**rank_environment(options, "127.0.0.1:1", "token", "job", "127.0.0.1:2"), "FTCOMM_REPLICA": "0"}
    )
    assert (settings.timeouts.op, settings.init_timeout) == (40.0, 33.0)


def test_a_directory_with_a_main_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("")
    RunOptions(replicas=1, script=str(tmp_path)).check()


@pytest.mark.parametrize("engine", ["host", "gpu-kernel", None])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_the_engine_changes_no_transport(monkeypatch: pytest.MonkeyPatch, engine: str | None, transport: str) -> None:
    monkeypatch.delenv("FTCOMM_ENGINE", raising=False)
    if engine is not None:
        monkeypatch.setenv("FTCOMM_ENGINE", engine)
    options = RunOptions(replicas=2, script="train.py", transport=transport)
    assert rank_environment(options, "127.0.0.1:1", "token", "job", "127.0.0.1:2")["FTCOMM_TRANSPORT"] == transport


@pytest.mark.parametrize(("state", "contributed"), [(WAITING, True), (RUNNING, False)])
def test_a_view_that_still_has_the_dead_lets_nobody_restart_the_last_that_holds_the_state(
    state: State, contributed: bool
) -> None:
    """While the coordinator is away, say: the other one waits for its start, or has been started and holds nothing."""
    options = RunOptions(2, "train.py")
    listener = ReplicaListener(*[lambda *told: None] * 5)
    launcher = Launcher(options)
    launcher._job.replicas = [ReplicaProcesses(number, options, {}, None, listener) for number in range(2)]  # type: ignore[arg-type]
    for replica in launcher._job.replicas:
        replica.state, replica.contributed = RUNNING, True
    launcher._job.replicas[0].state, launcher._job.replicas[0].contributed = state, contributed
    launcher._job.view = {"epoch": 1, "members": [{"replica": number, "contributing": True} for number in range(2)]}
    with pytest.raises(FtcommError, match="no other replica contributes now"):
        launcher.restart_replica(1)


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_removed_replica_whose_process_has_joined_anew_is_not_ended(
    comes_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script has caught the error, shut the group down and made another one."""
    options = RunOptions(2, "train.py")
    listener = ReplicaListener(*[lambda *told: None] * 5)
    launcher = Launcher(options)
    launcher._job.replicas = [ReplicaProcesses(number, options, {}, None, listener) for number in range(2)]  # type: ignore[arg-type]
    replica = launcher._job.replicas[1]
    replica.state, replica.joined, launcher._job.view = RUNNING, True, BOTH
    signals: list[int] = []
    monkeypatch.setattr(replica, "signal", signals.append)

    async def happens() -> None:
        launcher._events.hear({"kind": "removed", "replica": 1, "reason": "op 7 waits for it"})
        if comes_again:
            launcher._events.hear(COMES)
        launcher._removed.end(replica, replica.starts)

    asyncio.run(happens())
    assert signals == ([] if comes_again else [signal.SIGTERM])
    assert bool(replica.removed) is not comes_again


ALONE = {"kind": "view", "epoch": 2, "step": None, "members": [{"replica": 0, "contributing": True}], "why": "?"}
LOST = {**ALONE, "why": "lost 1: x", "lost": [1]}
BOTH = {**ALONE, "epoch": 1, "step": 0, "members": [{"replica": x, "contributing": True} for x in (0, 1)]}
COMES, SAYS = {"kind": "joined", "replica": 1}, {"replica": 1}


@pytest.mark.parametrize(
    ("before", "after", "ends"),
    [
        ([COMES, BOTH, LOST], [], True),
        ([COMES, BOTH, LOST, {**ALONE, "epoch": 3}], [], True),
        ([COMES, BOTH, ALONE], [], False),  # the change that had it was given up, and it waits for the next
        ([BOTH, LOST], [], False),  # its last life: this one is still on its way
        ([COMES, BOTH, LOST], [COMES], False),  # its process makes a new group
        ([COMES, BOTH, LOST], [COMES, {**BOTH, "epoch": 3}], False),
        ([COMES, BOTH, {**SAYS, "kind": "finished"}, LOST], [], False),
        ([COMES, BOTH, {**SAYS, "kind": "trained"}, LOST], [], False),
        ([COMES, BOTH, {**ALONE, "step": 7}, LOST], [], False),  # it has left
        ([COMES, BOTH, LOST], ["dies"], False),
        ([COMES, BOTH, LOST], ["starts"], False),
        ([COMES, BOTH, {**SAYS, "kind": "gives_up"}, LOST], [], False),  # its process ends by itself, and has longer
    ],
)
def test_a_lost_replica_is_ended_only_if_its_process_lives_and_has_no_other_reason_to(
    before: list[dict[str, Any]], after: list[Any], ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "REMOVED_TO_TERM", 0.0)
    options = RunOptions(2, "train.py")
    listener = ReplicaListener(*[lambda *told: None] * 5)
    launcher = Launcher(options, on_log=lambda text: None)
    launcher._job.replicas = [ReplicaProcesses(number, options, {}, None, listener) for number in range(2)]  # type: ignore[arg-type]
    for one in launcher._job.replicas:
        one.state = RUNNING
    replica, signals = launcher._job.replicas[1], []
    monkeypatch.setattr(replica, "signal", signals.append)

    async def happens() -> None:
        for event in before:
            launcher._events.hear(event)
        for event in after:
            if event == "dies":
                replica.state = WAITING
            elif event == "starts":
                replica.starts += 1
            else:
                launcher._events.hear(event)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(happens())
    assert signals == ([signal.SIGTERM] if ends else [])
    assert replica.removed == ("lost 1: x" if ends else "")


def test_a_timer_that_has_run_is_not_kept_and_one_that_has_not_is_cancelled() -> None:
    ran: list[str] = []

    async def happens() -> None:
        timers = Timers()
        for _ in range(100):
            timers.later(0.0, ran.append, "soon")
        timers.later(3600.0, ran.append, "late")
        while len(ran) < 100:
            await asyncio.sleep(0)
        (left,) = timers._timers
        timers.close()
        assert left.cancelled()

    asyncio.run(happens())
    assert ran == ["soon"] * 100


@pytest.mark.parametrize(("rank", "late"), [(0, [0, 1]), (1, [1])])
def test_a_host_awaits_the_leaving_of_those_that_it_has_asked(rank: int, late: list[int]) -> None:
    """On another host than the first these are its own, since those of the others train on."""
    options = RunOptions(2, "train.py", node=NodePlace(rank, 2, "127.0.0.1"))
    listener = ReplicaListener(*[lambda *told: None] * 5)
    said: list[str] = []
    launcher = Launcher(options, on_log=said.append)
    launcher._job.replicas = [ReplicaProcesses(number, options, {}, None, listener) for number in range(2)]  # type: ignore[arg-type]
    for one in launcher._job.replicas:
        one.state = RUNNING

    async def happens() -> None:
        launcher._shutdown._grace_is_over()

    asyncio.run(happens())
    assert [text.partition(" did not leave")[0] for text in said] == ["replicas 0, 1" if len(late) > 1 else "replica 1"]


@pytest.mark.parametrize("over", [False, True])
def test_a_job_that_does_not_answer_is_over_if_its_socket_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    """A connection that was accepted when the job ended may stay open."""
    monkeypatch.setattr("ftcomm.launch.admin.client.ANSWER_TIMEOUT", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        with AdminClient(tmp_path / "control") as client:
            if over:
                (tmp_path / "control").unlink()
            with pytest.raises(JobEnded if over else FtcommError, match="has ended" if over else "is its launcher"):
                client.status()
