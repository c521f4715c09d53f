"""`Launcher` with real processes: who is restarted and who is not, output, signals, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftcomm.errors import InitError
from ftcomm.launch import Launcher, RunOptions, policy, run
from ftcomm.launch.policy import State
from tests.rigs.deadlines import DEADLINE

pytestmark = pytest.mark.protocol

MARK = "FTCOMM_TEST_LAUNCH"  # in the environment of every process of a test

WAIT_FOR_GO = """
import os, sys, time
replica, rank = os.environ["FTCOMM_REPLICA"], os.environ["FTCOMM_SHARD"]
while not os.path.exists("go"):
    time.sleep(0.005)
"""


def marked(mark: str) -> set[int]:
    """Living processes whose environment carries the mark of a test; this one does not."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and f"{MARK}={mark}\0".encode() in Path("/proc", name, "environ").read_bytes():
                found.add(int(name))
    return found


def reaper_of(directory: Path) -> int:
    while True:  # a process in the midst of exec shows no command line yet
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                command = Path("/proc", name, "cmdline").read_bytes()
                if b"reaper.py" in command and str(directory).encode() in command:
                    return int(name)


class Job:
    """A launcher and all that it said. `react(event)` is called for every event."""

    def __init__(self, directory: Path, script: str, replicas: int = 3, **options: Any) -> None:
        path = directory / "script.py"
        path.write_text(textwrap.dedent(script))
        self.directory = directory
        self.events: list[dict[str, Any]] = []
        self.lines: list[tuple[int, int, str]] = []
        self.said: list[str] = []
        self.react: Callable[[dict[str, Any]], None] = lambda event: None
        options = {"backoff": 0.01, "env": {MARK: str(directory)}, **options}
        self.launcher = Launcher(
            RunOptions(replicas=replicas, script=str(path), **options),
            self._event,
            lambda replica, rank, line: self.lines.append((replica, rank, line)),
            self.said.append,
        )

    def _event(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.react(event)

    def run(self) -> int:
        async def main() -> int:
            return await asyncio.wait_for(self.launcher.run(), DEADLINE)

        code = asyncio.run(main())
        assert not marked(str(self.directory))
        assert self.launcher.pids() == {}
        assert [path.name for path in (self.directory / f"ftcomm-{os.getuid()}").iterdir()] == [".lock"]
        return code

    def go(self) -> None:
        (self.directory / "go").touch()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def starts(self) -> list[int]:
        """How often each replica was started."""
        ranks = self.launcher.options.ranks_per_replica
        started = [event["replica"] for event in self.of("process_started")]
        return [started.count(replica) // ranks for replica in range(self.launcher.options.replicas)]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path
    for pid in marked(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)


# -- the ordinary case -----------------------------------------------------------------------------------------------


def test_all_finish(here: Path) -> None:
    job = Job(
        here,
        """
        import os, sys
        print("main" if __name__ == "__main__" else "no", sys.argv[1:], sys.path[0])
        for number in range(5000):
            print("line", number)
        print("on stderr", file=sys.stderr)
        print("without an end", end="")
        """,
        replicas=2,
        ranks_per_replica=2,
        args=("--steps", "3"),
        log_dir=here / "logs",
    )
    assert job.run() == run.FINISHED
    expected = [f"main ['--steps', '3'] {here}", *(f"line {number}" for number in range(5000))]
    for replica, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        own = [line for r, k, line in job.lines if (r, k) == (replica, rank)]
        own.remove("on stderr")
        assert own == [*expected, "without an end"]
        logged = (here / "logs" / f"replica-{replica}.shard-{rank}.incarnation-0.log").read_text()
        assert sorted(logged.replace("on stderr\n", "").split("\n")) == sorted(own)
    assert job.starts() == [1, 1]
    assert [event["code"] for event in job.of("process_exited")] == [0] * 4
    assert job.launcher.states() == {0: State.FINISHED, 1: State.FINISHED}
    assert all({"time", "mono", "kind"} <= set(event) for event in job.events)


def test_a_rank_has_its_place_in_the_environment(here: Path) -> None:
    """The leader's socket is listening before any rank runs, and rank 0 inherits it."""
    job = Job(
        here,
        """
        import os, socket
        from ftcomm.settings import Settings
        settings = Settings.from_env()
        assert (settings.replicas, settings.ranks_per_replica, settings.transport) == (2, 2, "tcp")
        assert settings.timeouts.heartbeat == 1.5
        assert os.environ["OMP_NUM_THREADS"] == "1"
        host, port = settings.leader.split(":")
        if settings.shard == 0:
            leader = socket.socket(fileno=settings.leader_fd)
            assert leader.getsockname() == (host, int(port))
            peer, _ = leader.accept()
            print("served", peer.recv(10).decode())
        else:
            assert settings.leader_fd is None
            socket.create_connection((host, int(port))).sendall(b"rank 1")
        """,
        replicas=2,
        ranks_per_replica=2,
        transport="tcp",
        heartbeat_timeout=1.5,
        env={MARK: str(here), "OMP_NUM_THREADS": "1", "FTCOMM_ENGINE": "host"},
    )
    assert job.run() == run.FINISHED, job.lines
    assert sorted(job.lines) == [(0, 0, "served rank 1"), (1, 0, "served rank 1")]


def test_ranks_of_further_hosts_are_told_where_their_agent_is(here: Path) -> None:
    """The first of each host gets the socket to which the others come; the ranks beside the leader have no agent."""
    job = Job(
        here,
        """
        import socket
        from ftcomm.settings import Settings
        settings = Settings.from_env()
        shard, first = settings.shard, settings.shard // 2 * 2
        if shard < 2:
            assert (settings.host_agent, settings.host_agent_fd) == ("", None)
            raise SystemExit(0)
        assert settings.host_ranks == 2
        host, port = settings.host_agent.split(":")
        if shard == first:
            agent = socket.socket(fileno=settings.host_agent_fd)
            assert agent.getsockname() == (host, int(port))
            print("served", agent.accept()[0].recv(10).decode())
        else:
            assert settings.host_agent_fd is None
            socket.create_connection((host, int(port))).sendall(b"rank %d" % shard)
        """,
        replicas=1,
        ranks_per_replica=6,
        host_ranks=2,
        env={MARK: str(here)},
    )
    assert job.run() == run.FINISHED, job.lines
    assert sorted(job.lines) == [(0, 2, "served rank 3"), (0, 4, "served rank 5")]


def test_the_token_is_in_no_command_line_and_no_event(here: Path) -> None:
    script = WAIT_FOR_GO + "print(os.environ['FTCOMM_TOKEN'])\nsys.exit(3)"  # its last lines are in an event
    job = Job(here, script, replicas=1, max_restarts=0, events=here / "events.jsonl")
    commands = []

    def react(event: dict[str, Any]) -> None:
        if event["kind"] == "process_started":
            commands.append(Path(f"/proc/{event['pid']}/cmdline").read_bytes())
            job.go()

    job.react = react
    assert job.run() == run.FAILED
    [(_, _, token)] = job.lines
    assert len(token) == 32
    assert token.encode() not in b"".join(commands)
    assert [event["lines"] for event in job.of("process_exited")] == [["***"]]
    assert token not in (here / "events.jsonl").read_text()


# -- deaths ----------------------------------------------------------------------------------------------------------


def test_only_the_dead_replica_is_restarted(here: Path) -> None:
    job = Job(here, WAIT_FOR_GO)
    deaths = 3

    def react(event: dict[str, Any]) -> None:
        if event["kind"] == "process_started" and event["replica"] == 1:
            if job.starts()[1] <= deaths:
                os.kill(event["pid"], signal.SIGKILL)
            else:
                job.go()

    job.react = react
    assert job.run() == run.FINISHED
    assert job.starts() == [1, 1 + deaths, 1]
    killed = [event for event in job.of("process_exited") if event["signal"] == "SIGKILL"]
    assert [event["replica"] for event in killed] == [1] * deaths
    assert all(event["code"] is None for event in killed)
    assert [event["restart"] for event in job.of("restarting")] == [1, 2, 3]
    assert [event["delay"] for event in job.of("restarting")] == [0.01, 0.02, 0.04]
    pid = killed[0]["pid"]
    assert f"replica 1 (pid {pid}) was killed by SIGKILL; restarting it in 0.01 s (restart 1 of 10)" in job.said


def test_a_dead_rank_takes_its_replica_down_and_no_other(here: Path) -> None:
    job = Job(here, WAIT_FOR_GO + "print('over')", replicas=2, ranks_per_replica=3)

    def react(event: dict[str, Any]) -> None:
        if event["kind"] == "process_started" and (event["replica"], event["shard"]) == (1, 2):
            os.kill(job.launcher.pids()[0, 1], signal.SIGKILL)
        if event["kind"] == "process_started" and job.starts() == [2, 1]:
            job.go()

    job.react = react
    assert job.run() == run.FINISHED
    assert job.starts() == [2, 1]
    lost = [(event["replica"], event["shard"]) for event in job.of("process_exited") if event["signal"]]
    assert lost[0] == (0, 1)
    assert sorted(lost) == [(0, 0), (0, 1), (0, 2)]
    assert any("replica 0 (shard 1, pid" in text for text in job.said)


def test_restarts_end_and_the_others_go_on(here: Path) -> None:
    script = WAIT_FOR_GO.replace("while", "if replica == '0': sys.exit(7)\nwhile")
    job = Job(here, script, max_restarts=2)

    def react(event: dict[str, Any]) -> None:
        if event["kind"] == "failed":
            job.go()

    job.react = react
    assert job.run() == run.FAILED
    assert job.starts() == [3, 1, 1]
    assert job.launcher.states() == {0: State.FAILED, 1: State.FINISHED, 2: State.FINISHED}
    assert any("exited with code 7; it was restarted 2 times within an hour" in text for text in job.said)


@pytest.mark.parametrize(
    ("call", "refused"),
    [("Popen", {1, 2, 3}), ("pidfd_open", {1, 2, 3}), ("pidfd_open", {2, 4, 6})],
    ids=["process", "watch", "watch of the second rank"],
)
def test_what_the_system_refuses_at_a_restart_is_tried_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, call: str, refused: set[int]
) -> None:
    """It counts against no limit, and no process is left that nobody watches."""
    module: Any = subprocess if call == "Popen" else os
    real, calls = getattr(module, call), 0
    job = Job(here, WAIT_FOR_GO, replicas=2, ranks_per_replica=2, max_restarts=1)

    def refuses(*args: Any, **options: Any) -> Any:
        nonlocal calls
        if len(job.of("process_started")) >= 4:
            calls += 1
            if calls in refused:
                raise OSError(errno.EMFILE, "Too many open files")
        return real(*args, **options)

    def react(event: dict[str, Any]) -> None:
        if event["kind"] == "process_started" and len(job.of("process_started")) == 4:
            os.kill(event["pid"], signal.SIGKILL)
        if event["kind"] == "process_started" and calls > max(refused) and len(job.launcher.pids()) == 4:
            job.go()

    job.react = react
    monkeypatch.setattr(module, call, refuses)
    assert job.run() == run.FINISHED
    assert [event["delay"] for event in job.of("restarting")] == [0.01, 0.02, 0.04, 0.08]
    assert {event["restart"] for event in job.of("restarting")} == {1}
    assert any("Too many open files" in text for text in job.said)


def test_too_few_left_end_the_job(here: Path) -> None:
    job = Job(
        here, WAIT_FOR_GO.replace("while", "if replica == '0': sys.exit(7)\nwhile"), max_restarts=0, min_replicas=3
    )
    assert job.run() == run.FAILED
    assert any("the job failed: restarts are switched off" in text for text in job.said)


def test_a_wrong_setting_of_one_rank_ends_a_job_that_has_not_begun(here: Path) -> None:
    """With its words on all replicas, and at once: a restart would not mend it, nor would the others begin without."""
    script = """
        import os
        if (os.environ["FTCOMM_REPLICA"], os.environ["FTCOMM_SHARD"]) == ("1", "0"):
            os.environ["FTCOMM_TRANSPORT"] = "bogus"
        import ftcomm
        ftcomm.init()
        """
    job = Job(here, script, replicas=2, ranks_per_replica=2, backoff=1000.0)
    assert job.run() == run.FAILED
    assert job.starts() == [1, 1]
    wrong = "replica 1 shard 0 cannot start: FTCOMM_TRANSPORT='bogus'; expected one of"
    assert any(
        f"InitError: replica 0 shard {rank} could not join the job" in line and wrong in line
        for _, rank, line in job.lines
    ), job.lines
    assert any("the job failed: it cannot begin" in text for text in job.said)


@pytest.mark.parametrize("late", [True, False])
def test_a_job_that_waits_for_a_replica_that_was_given_up_is_lost(here: Path, late: bool) -> None:
    """Before or after the others have come."""
    script = """
        import os, sys, time
        if os.environ["FTCOMM_REPLICA"] == "1":
            while LATE and not os.path.exists("go"):
                time.sleep(0.01)
            sys.exit(7)
        import ftcomm
        ftcomm.init()
        """
    job = Job(here, script.replace("LATE", str(late)), replicas=2, max_restarts=0)
    job.react = lambda event: job.go() if event["kind"] == "joined" else None
    assert job.run() == run.FAILED
    assert job.starts() == [1, 1]
    assert any("the job failed: it cannot begin without replica 1" in text for text in job.said)


def test_with_all_dead_at_once_the_job_is_lost(here: Path) -> None:
    job = Job(here, "import sys\nsys.exit(5)", backoff=30.0)
    assert job.run() == run.FAILED
    assert job.starts() == [1, 1, 1]
    assert any("the job failed: all replicas died before the job began" in text for text in job.said)
    assert len(job.of("failed")) == 1


def test_no_restart_when_the_others_have_finished(here: Path) -> None:
    job = Job(
        here,
        "import os, sys, time\nif os.environ['FTCOMM_REPLICA'] == '2':"
        + textwrap.indent(WAIT_FOR_GO, " ")
        + " sys.exit(4)",
    )

    def react(event: dict[str, Any]) -> None:
        if len(job.of("process_exited")) == 2:
            job.go()

    job.react = react
    assert job.run() == run.FAILED
    assert job.starts() == [1, 1, 1]
    assert any("the others have ended, so there is no replica to catch up from" in text for text in job.said)
    assert job.said[-1] == "the training is complete on replicas 0, 1; replica 2 failed"


def test_what_a_dead_rank_started_dies_with_it(here: Path) -> None:
    """Its group, and what went into a session of its own; while the same of the other replica live on."""
    job = Job(
        here,
        """
        import os, subprocess, sys, time
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
        print("children", *(child.pid for child in children), flush=True)
        time.sleep(600)
        """,
        replicas=2,
        max_restarts=0,
    )
    seen: dict[int, list[int]] = {}

    async def main() -> int:
        running = asyncio.ensure_future(job.launcher.run())
        while len(seen) < 2:
            await asyncio.sleep(0.01)
            seen.update({replica: [int(pid) for pid in line.split()[1:]] for replica, _, line in job.lines})
        os.kill(job.launcher.pids()[0, 0], signal.SIGKILL)
        while set(seen[0]) & marked(str(here)):
            await asyncio.sleep(0.01)
        assert set(seen[1]) < marked(str(here))
        os.kill(job.launcher.pids()[1, 0], signal.SIGKILL)
        return await running

    assert asyncio.run(asyncio.wait_for(main(), DEADLINE)) == run.FAILED
    assert not marked(str(here))


def test_the_launcher_cleans_up_itself_when_its_reaper_was_killed(here: Path) -> None:
    job = Job(
        here,
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)",
        replicas=1,
    )

    def react(event: dict[str, Any]) -> None:
        if event["kind"] == "process_started":
            os.kill(reaper_of(here), signal.SIGKILL)

    job.react = react
    assert job.run() == run.FINISHED


def test_cancellation_leaves_nothing(here: Path) -> None:
    job = Job(here, WAIT_FOR_GO)

    async def main() -> None:
        running = asyncio.ensure_future(job.launcher.run())
        while len(job.of("process_started")) < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(asyncio.wait_for(main(), DEADLINE))
    assert not marked(str(here))


# -- signals ---------------------------------------------------------------------------------------------------------

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


def interrupt_when_ready(job: Job, times: int) -> None:
    ready: list[int] = []

    def line(replica: int, rank: int, text: str) -> None:
        ready.append(replica)
        if len(ready) == job.launcher.options.replicas:
            for _ in range(times):
                job.launcher.interrupt()

    job.launcher._report._on_line = line


def test_an_interrupt_ends_replicas_that_are_in_no_view(here: Path) -> None:
    job = Job(here, STUBBORN.replace("signal.SIG_IGN", "lambda *_: exit(0)"))
    interrupt_when_ready(job, 1)
    assert job.run() == run.DRAINED
    assert set(job.launcher.states().values()) == {State.STOPPED}


def test_who_does_not_leave_within_the_grace_is_ended(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "TERM_TO_KILL", 0.1)
    job = Job(here, STUBBORN, grace=0.1)
    interrupt_when_ready(job, 1)
    assert job.run() == run.FAILED
    assert any("replicas 0, 1, 2 did not leave within 0.1 s and are ended now" in text for text in job.said)


def test_a_second_interrupt_ends_the_job_at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "TERM_TO_KILL", 0.1)
    job = Job(here, STUBBORN)
    interrupt_when_ready(job, 2)
    assert job.run() == run.KILLED


def test_a_third_interrupt_does_not_wait(here: Path) -> None:
    job = Job(here, STUBBORN)
    interrupt_when_ready(job, 3)
    assert job.run() == run.KILLED


def test_draining_cancels_restarts(here: Path) -> None:
    job = Job(here, WAIT_FOR_GO, backoff=30.0)

    def react(event: dict[str, Any]) -> None:
        if event["kind"] == "process_started" and event["replica"] == 2:
            os.kill(event["pid"], signal.SIGKILL)
        if event["kind"] == "restarting":
            asyncio.get_running_loop().call_soon(job.launcher.interrupt)

    job.react = react
    assert job.run() == run.DRAINED
    assert job.starts() == [1, 1, 1]


# -- the coordinator -------------------------------------------------------------------------------------------------


def test_the_coordinator_is_restarted_at_the_same_address(here: Path) -> None:
    job = Job(here, WAIT_FOR_GO)

    async def main() -> int:
        running = asyncio.ensure_future(job.launcher.run())
        while len(job.of("process_started")) < 3:
            await asyncio.sleep(0.01)
        before = job.launcher.coordinator
        await job.launcher.restart_coordinator()
        after = job.launcher.coordinator
        assert after is not before
        assert after.endpoint == before.endpoint
        host, port = after.endpoint.split(":")
        socket.create_connection((host, int(port)), timeout=10).close()
        job.go()
        return await running

    assert asyncio.run(asyncio.wait_for(main(), DEADLINE)) == run.FINISHED
    with pytest.raises(RuntimeError, match="not running"):
        _ = job.launcher.coordinator


def test_a_coordinator_that_cannot_start_is_an_init_error(here: Path) -> None:
    job = Job(here, WAIT_FOR_GO, host="192.0.2.1")  # an address for documentation, on no machine
    with pytest.raises(InitError, match="the coordinator cannot start"):
        job.run()
    assert job.of("process_started") == []
