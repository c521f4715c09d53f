"""`ftcomm run` and `ftcomm coordinator` as a user starts them: signals, terminals, power cuts, nothing left behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftcomm.process.descriptors import JOB_PEER
from tests.rigs.deadlines import DEADLINE
from tests.rigs.ports import free_port

pytestmark = pytest.mark.protocol

MARK = "FTCOMM_TEST_LAUNCH_COMMAND"  # in the environment of every process of a test but the reaper


class Shell:
    """Starts commands in one directory, with everything of ftcomm's in there as well."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.runs = directory / f"ftcomm-{os.getuid()}"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FTCOMM_")},
            "XDG_RUNTIME_DIR": str(directory),
            MARK: str(directory),
        }
        self._commands: list[subprocess.Popen[str]] = []

    def script(self, text: str) -> None:
        (self.directory / "script.py").write_text(textwrap.dedent(text))

    def start(self, *argv: str, **options: Any) -> subprocess.Popen[str]:
        environment = {**self._environment, **options.pop("env", {})}
        command = subprocess.Popen(
            [sys.executable, "-c", "from ftcomm.cli import main; main()", *argv],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options},
            cwd=self.directory,
            env=environment,
            text=True,
        )
        self._commands.append(command)
        return command

    def run(self, *argv: str) -> tuple[int, str, str]:
        """To its end: exit code, stdout, stderr."""
        command = self.start(*argv)
        out, err = command.communicate(timeout=DEADLINE)
        return command.returncode, out, err

    def processes(self) -> set[int]:
        """All that live, reapers included (they carry the directory in their command line)."""
        found = set()
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if not name.isdigit():
                    continue
                environment, command = (Path("/proc", name, file).read_bytes() for file in ("environ", "cmdline"))
                ours = f"{MARK}={self.directory}\0".encode() in environment
                if ours or (b"reaper.py" in command and str(self.runs).encode() in command):
                    found.add(int(name))
        return found

    def left(self) -> list[str]:
        """Directories of runs that are still there."""
        return [path.name for path in self.runs.iterdir() if path.is_dir()] if self.runs.exists() else []

    def until(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not what():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)

    def files(self, *names: str) -> bool:
        return all((self.directory / name).exists() for name in names)

    def close(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for command in self._commands:
            command.communicate(timeout=DEADLINE)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def test_the_first_job_of_the_quick_start_runs_as_it_stands(shell: Shell) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "quickstart.md").read_text()
    script = page.split("## A first job")[1].split("```python\n")[1].split("```")[0]
    (shell.directory / "sums.py").write_text(script.replace("steps(300", "steps(3"))
    code, out, err = shell.run("run", "--replicas", "2", "sums.py")
    assert code == 0, err
    assert sorted(re.findall(r"^\[(\d)\] in all 9.0$", out, re.MULTILINE)) == ["0", "1"], out
    assert "[1] step 2: 3 from replicas (0, 1)" in out


SLEEP = """
import os, signal, sys, time
open(f"ready-{os.environ['FTCOMM_REPLICA']}", "w").close()
time.sleep(600)
"""


# -- output ----------------------------------------------------------------------------------------------------------


def test_lines_are_prefixed_and_keep_their_stream(shell: Shell) -> None:
    shell.script(
        """
        import os, sys
        print("out", sys.argv)
        print("err", file=sys.stderr)
        """
    )
    code, out, err = shell.run("run", "--replicas", "2", "script.py", "--replicas", "-m", "--", "x")
    assert code == 0
    arguments = "['script.py', '--replicas', '-m', '--', 'x']"
    assert sorted(out.splitlines()) == [f"[0] out {arguments}", f"[1] out {arguments}"]
    assert sorted(err.splitlines()) == [
        "[0] err",
        "[1] err",
        "ftcomm: replica 0 finished",
        "ftcomm: replica 1 finished",
    ]
    assert shell.left() == []
    assert shell.processes() == set()


def test_each_peer_by_tcp_takes_as_many_sockets_as_a_rank_asks_room_for(shell: Shell) -> None:
    """Before it connects. If there were too few, it would find that out from one that it does not reach."""
    shell.script(
        """
        import os
        os.environ["FTCOMM_TRANSPORT"] = "tcp"
        import numpy as np
        import ftcomm
        ftcomm.init()
        ftcomm.allreduce(np.ones(300_000, np.float32))
        sockets = [fd for fd in os.scandir("/proc/self/fd") if os.readlink(fd.path).startswith("socket:")]
        print(len(sockets))
        ftcomm.allreduce(np.ones(1, np.float32))
        """
    )
    least = {}  # another process may be dialling a rank at that moment, and hardly all of them
    for replicas in (2, 5):
        code, out, err = shell.run("run", "--replicas", str(replicas), "script.py")
        assert code == 0, err
        least[replicas] = min(int(line.rpartition(" ")[2]) for line in out.splitlines())
    assert least[5] - least[2] == 3 * JOB_PEER


def test_a_module_runs_as_with_python(shell: Shell) -> None:
    (shell.directory / "package").mkdir()
    (shell.directory / "package" / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    code, out, _ = shell.run("run", "--replicas", "1", "--ranks-per-replica", "2", "-m", "package.train", "-v")
    assert code == 0
    assert sorted(out.splitlines()) == ["[0.0] __main__ package ['-v']", "[0.1] __main__ package ['-v']"]


def test_nothing_is_lost_to_a_slow_reader_and_it_stops_no_event(shell: Shell) -> None:
    """Nobody reads while replica 0 writes 8 MB; the death of replica 1 is still noticed."""
    shell.script(
        """
        import os, sys
        if os.environ["FTCOMM_REPLICA"] == "0":
            for number in range(8192):
                print(f"{number:01023d}")
        else:
            import time
            while not os.path.exists("die"):
                time.sleep(0.01)
            sys.exit(9)
        """
    )
    command = shell.start("run", "--replicas", "2", "--max-restarts", "0", "--events", "events", "script.py")
    shell.until(lambda: shell.files("events"))
    (shell.directory / "die").touch()
    shell.until(lambda: '"code": 9' in (shell.directory / "events").read_text())
    out, _ = command.communicate(timeout=DEADLINE)
    assert command.returncode == 1
    assert out.splitlines() == [f"[0] {number:01023d}" for number in range(8192)]


def test_a_reader_that_goes_away_does_not_end_the_job(shell: Shell) -> None:
    shell.script("for number in range(100000): print(number)\nopen('over', 'w').close()")
    command = shell.start("run", "--replicas", "1", "script.py")
    assert command.stdout is not None
    assert command.stdout.readline() == "[0] 0\n"
    command.stdout.close()
    command.stdout = None
    command.communicate(timeout=DEADLINE)
    assert command.returncode == 0
    assert shell.files("over")


def test_events_are_json_lines(shell: Shell) -> None:
    shell.script("")
    code, _, _ = shell.run("run", "--replicas", "2", "--events", "events.jsonl", "script.py")
    assert code == 0
    events = [json.loads(line) for line in (shell.directory / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events].count("process_started") == 2
    assert [event["kind"] for event in events].count("process_exited") == 2


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_drains(shell: Shell, number: int) -> None:
    shell.script(SLEEP)
    command = shell.start("run", "--replicas", "2", "script.py")
    shell.until(lambda: shell.files("ready-0", "ready-1"))
    command.send_signal(number)
    _, err = command.communicate(timeout=DEADLINE)
    assert command.returncode == 3, err
    assert "ftcomm: draining: " in err
    assert "Traceback" not in err
    assert shell.left() == []
    assert shell.processes() == set()


def test_a_signal_that_comes_twice_is_one(shell: Shell) -> None:
    """timeout(1) and some batch systems signal a process, and its group right after."""
    shell.script(SLEEP)
    command = shell.start("run", "--replicas", "2", "script.py", start_new_session=True)
    shell.until(lambda: shell.files("ready-0", "ready-1"))
    command.send_signal(signal.SIGTERM)
    os.killpg(command.pid, signal.SIGINT)  # another number: two of the same could be delivered as one
    _, err = command.communicate(timeout=DEADLINE)
    assert command.returncode == 3, err
    assert err.count("ftcomm: draining: ") == 1
    assert "interrupted again" not in err


def interrupt_until(command: subprocess.Popen[str], text: str) -> None:
    """As somebody who presses Ctrl-C again and again, until the command says `text`."""
    assert command.stderr is not None
    said = ""
    while text not in said:
        command.send_signal(signal.SIGINT)
        if select.select([command.stderr], [], [], 0.2)[0]:
            said += os.read(command.stderr.fileno(), 1 << 16).decode()


def test_the_terminals_interrupt_does_not_reach_the_ranks(shell: Shell) -> None:
    """Ctrl-C goes to the whole foreground group; only the launcher is in it."""
    shell.script(SLEEP.replace("open(", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen("))
    command = shell.start("run", "--replicas", "2", "--grace", "600", "script.py", start_new_session=True)
    shell.until(lambda: shell.files("ready-0", "ready-1"))
    os.killpg(command.pid, signal.SIGINT)
    assert command.stderr is not None
    while "draining" not in command.stderr.readline():
        pass
    ranks = [pid for pid in shell.processes() if b"script.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 3  # and the launcher
    interrupt_until(command, "interrupted again")
    _, err = command.communicate(timeout=DEADLINE)
    assert command.returncode == 130
    assert "KeyboardInterrupt" not in err


# -- nothing is left behind ------------------------------------------------------------------------------------------


def test_a_killed_launcher_leaves_nothing(shell: Shell) -> None:
    """Ranks that ignore what they can, their children, those in sessions of their own, those with no environment."""
    shell.script(
        """
        import os, signal, subprocess, sys, time
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        sleep = [sys.executable, "-c", "import time; time.sleep(600)", os.getcwd()]
        children = [
            subprocess.Popen(sleep),
            subprocess.Popen(sleep, start_new_session=True),
            subprocess.Popen(sleep, env={}),
            subprocess.Popen(["/bin/sh", "-c", '"$@" & "$@"', "sh", *sleep]),
        ]
        name = f"ready-{os.environ['FTCOMM_REPLICA']}-{os.environ['FTCOMM_SHARD']}"
        open(name + ".part", "w").write(" ".join(str(child.pid) for child in children))
        os.rename(name + ".part", name)
        time.sleep(600)
        """
    )
    command = shell.start("run", "--replicas", "2", "--ranks-per-replica", "2", "script.py")
    names = [f"ready-{replica}-{rank}" for replica in (0, 1) for rank in (0, 1)]
    shell.until(lambda: shell.files(*names))
    assert len(shell.left()) == 1
    children = {int(pid) for name in names for pid in (shell.directory / name).read_text().split()}
    assert all(os.path.exists(f"/proc/{pid}") for pid in children)
    command.kill()
    command.wait(DEADLINE)
    shell.until(lambda: not shell.processes() and not shell.left())
    assert not {pid for pid in children if str(shell.directory).encode() in _command_line(pid)}


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_launcher_and_reaper_killed_together(shell: Shell) -> None:
    """The ranks die by the kernel's hand; the next start removes the rest."""
    shell.script(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n" + SLEEP
    )
    command = shell.start("run", "--replicas", "1", "script.py")
    shell.until(lambda: shell.files("ready-0"))
    reapers = [pid for pid in shell.processes() if b"reaper.py" in _command_line(pid)]
    assert len(reapers) == 1
    os.kill(reapers[0], signal.SIGKILL)
    command.kill()
    command.wait(DEADLINE)
    shell.until(lambda: not [pid for pid in shell.processes() if b"script.py" in _command_line(pid)])
    assert len(shell.processes()) == 1  # what the rank left in a session of its own
    assert len(shell.left()) == 1
    shell.script("")
    assert shell.run("run", "--replicas", "1", "script.py")[0] == 0
    assert shell.processes() == set()
    assert shell.left() == []


def test_the_next_start_removes_only_what_nobody_uses(shell: Shell) -> None:
    shell.runs.mkdir(mode=0o700)
    for name in ("power-cut", "unlocked", "in-use"):
        (shell.runs / name).mkdir()
    (shell.runs / "power-cut" / "lock").touch()
    (shell.runs / "power-cut" / "views").touch()
    shell.script("")
    with open(shell.runs / "in-use" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert shell.run("run", "--replicas", "1", "script.py")[0] == 0
    assert shell.left() == ["in-use"]


def test_two_runs_at_once_do_not_touch_each_other(shell: Shell) -> None:
    shell.script(SLEEP)
    first = shell.start("run", "--replicas", "1", "script.py")
    shell.until(lambda: shell.files("ready-0"))
    (shell.directory / "other.py").write_text("")
    assert shell.run("run", "--replicas", "1", "other.py")[0] == 0
    assert len(shell.left()) == 1
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=DEADLINE)
    assert first.returncode == 3


def test_a_run_inside_a_rank(shell: Shell) -> None:
    """The inner run's processes are the outer's too, so the outer's end is theirs."""
    shell.script(SLEEP)
    (shell.directory / "outer.py").write_text(
        "from ftcomm.cli import main\nmain(['run', '--replicas', '2', 'script.py'])\n"
    )
    command = shell.start("run", "--replicas", "1", "outer.py")
    shell.until(lambda: shell.files("ready-0", "ready-1"))
    assert len(shell.left()) == 2
    command.kill()
    command.wait(DEADLINE)
    shell.until(lambda: not shell.processes() and not shell.left())


def test_too_few_open_files_are_one_line_that_says_what_to_type(shell: Shell) -> None:
    """Said before any rank has started, with the number that this job needs."""
    shell.script("")
    few = resource.RLIMIT_NOFILE, (40, 40)
    command = shell.start("run", "--replicas", "2", "script.py", preexec_fn=lambda: resource.setrlimit(*few))
    _, err = command.communicate(timeout=DEADLINE)
    said = r"ftcomm: ftcomm run, which starts 2 ranks on this host, needs up to (\d+) open files, and this process may "
    found = re.fullmatch(said + r"have 40; raise the limit \(ulimit -n (\d+); LimitNOFILE of systemd, .*\)\n", err)
    assert found is not None, err
    assert 40 < int(found[1]) == int(found[2]) < 100
    assert command.returncode == 2


# -- the coordinator alone -------------------------------------------------------------------------------------------


def exported(coordinator: subprocess.Popen[str], name: str) -> str:
    """What the coordinator tells every replica to export by that name. Reads what it says up to there."""
    assert coordinator.stdout is not None
    for line in coordinator.stdout:
        if line.startswith(f"  export {name}="):
            return line.strip().partition("=")[2]
    raise AssertionError(f"no {name}")


def test_coordinator_says_what_to_export_and_can_be_restarted(shell: Shell) -> None:
    port = str(free_port())
    argv = ("coordinator", "--replicas", "3", "--ranks-per-replica", "2", "--port", port, "--heartbeat-timeout", "2")
    names: set[str] = set()
    for _ in range(2):
        command = shell.start(*argv, env={"FTCOMM_TOKEN": "a-secret-of-the-test"})
        assert command.stdout is not None
        assert command.stdout.readline().startswith(f"ftcomm: coordinator at 127.0.0.1:{port}, waiting for 3 replicas")
        said = []
        while not said or "FTCOMM_OP_TIMEOUT" not in said[-1]:
            said.append(command.stdout.readline())
        assert said[0] == f"  export FTCOMM_COORDINATOR=127.0.0.1:{port}\n"
        assert "  export FTCOMM_HEARTBEAT_TIMEOUT=2\n" in said
        names |= {line for line in said if "FTCOMM_JOB" in line}
        assert len(names) == 1, "the ranks of the job would be refused after a restart"
        assert "a-secret-of-the-test" not in "".join(said)
        assert shell.files(f"ftcomm-views-{port}.jsonl")
        other = shell.start(*argv[:-2], "--store", "other", env={"FTCOMM_TOKEN": "a-secret-of-the-test"})
        _, err = other.communicate(timeout=DEADLINE)
        assert other.returncode == 2
        assert f"127.0.0.1:{port}" in err
        assert "--port" in err
        assert err.count("\n") == 1
        command.send_signal(signal.SIGTERM)
        _, err = command.communicate(timeout=DEADLINE)
        assert command.returncode == 3
        assert "a-secret-of-the-test" not in err
        assert "Start this coordinator again" in err


def test_a_coordinator_serves_torchs_store_where_it_says(shell: Shell) -> None:
    argv = ("coordinator", "--replicas", "1", "--port", "0", "--torch-store")
    command = shell.start(*argv, "0", env={"FTCOMM_TOKEN": "a-secret-of-the-test"})
    assert command.stdout is not None
    line = ""
    while "FTCOMM_STORE" not in line:
        line = command.stdout.readline()
    port = line.rpartition(":")[2].strip()
    with socket.create_connection(("127.0.0.1", int(port)), timeout=DEADLINE) as client:
        client.sendall(b"\x00\xce\xf7\x85<\rr[\x00\x00")  # as torch greets: it is alive, and says the same back
        assert client.recv(4) == b"r[\x00\x00"
    other = shell.start(*argv, port, "--store", "other", env={"FTCOMM_TOKEN": "a-secret-of-the-test"})
    _, err = other.communicate(timeout=DEADLINE)
    assert other.returncode == 2
    assert f"torch's store cannot listen on 127.0.0.1:{port}" in err
    assert err.count("\n") == 1
    assert not (shell.directory / "other").exists()  # it ended before it began to serve
    command.send_signal(signal.SIGTERM)
    command.communicate(timeout=DEADLINE)
    assert command.returncode == 3


def test_two_coordinators_of_one_file(shell: Shell) -> None:
    argv = ("coordinator", "--replicas", "1", "--port", "0", "--store", "views")
    first = shell.start(*argv, env={"FTCOMM_TOKEN": "a-secret-of-the-test"})
    assert first.stdout is not None
    first.stdout.readline()
    second = shell.start(*argv, env={"FTCOMM_TOKEN": "a-secret-of-the-test"})
    _, err = second.communicate(timeout=DEADLINE)
    assert second.returncode == 2
    assert "in use by another coordinator" in err
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=DEADLINE)
    assert first.returncode == 3


def test_a_job_that_failed_leaves_no_file_of_views(shell: Shell) -> None:
    """The start from a checkpoint that the message asks for goes with the same options. It is another job, which
    refuses ranks of the last one."""
    argv = ("coordinator", "--replicas", "1", "--port", "0", "--store", "views")
    shell.script("import os, signal, ftcomm; ftcomm.init(); os.kill(os.getpid(), signal.SIGKILL)")
    token, last = {"FTCOMM_TOKEN": "a-secret-of-the-test", MARK: str(shell.directory)}, ""
    for _ in range(2):
        command = shell.start(*argv, env=token)
        endpoint, job = exported(command, "FTCOMM_COORDINATOR"), exported(command, "FTCOMM_JOB")
        place = {"FTCOMM_COORDINATOR": endpoint, "FTCOMM_REPLICAS": "1", "FTCOMM_REPLICA": "0"}

        def rank(name: str, place: dict[str, str] = place) -> tuple[int, str]:
            done = subprocess.run(
                [sys.executable, "script.py"],
                cwd=shell.directory,
                env={**os.environ, **place, **token, "FTCOMM_JOB": name},
                timeout=DEADLINE,
                stderr=subprocess.PIPE,
                text=True,
            )
            return done.returncode, done.stderr

        code, said = rank(last)
        assert code == 1
        assert (f"it is of the job {last!r}" if last else "it names no job") in said
        assert f"If it belongs to this job: export FTCOMM_JOB={job}." in said
        assert rank(job)[0] == -signal.SIGKILL
        _, err = command.communicate(timeout=DEADLINE)
        assert command.returncode == 1
        assert "last checkpoint" in err
        assert not shell.files("views")
        assert not shell.files("views.job")
        last = job


def test_scripts_that_fail_alike_are_not_said_to_be_killed(shell: Shell) -> None:
    """The launcher ends a job that has failed. These end by themselves, and their output and codes say why."""
    shell.script("""
        import os, time, ftcomm
        ftcomm.init()
        for step in ftcomm.steps(5, start=int(os.environ["FTCOMM_REPLICA"])):
            pass
    """)
    code, out, err = shell.run("run", "--replicas", "2", "script.py")
    assert code == 1
    assert err.count("StateError: The replicas (shard 0 of each) do not begin alike") == 2, err
    assert len(re.findall(r"ftcomm: replica [01] \(pid \d+\) exited with code 1", out + err)) == 2, err
    assert "SIGTERM" not in out + err


def test_a_script_that_has_failed_and_does_not_end_is_killed_and_that_is_said(shell: Shell) -> None:
    shell.script("""
        import atexit, threading, ftcomm
        atexit.register(threading.Event().wait)
        ftcomm.init()
        for step in ftcomm.steps(5):
            raise ValueError
    """)
    code, _, err = shell.run("run", "--replicas", "1", "script.py")
    assert code == 1
    assert "ValueError" in err
    assert re.search(r"replica 0 \(pid \d+\) was killed by SIGKILL after its script had ended with an error", err), err


EXITS = """
import atexit, os, sys
from sys import exit as leave
import numpy as np
import ftcomm
if "raise Val" in os.environ["HOW"]:
    import torch.distributed as dist
    dist.init_process_group("ftcomm")
    atexit.register(dist.destroy_process_group)
    group = ftcomm.default_group()
else:
    group = ftcomm.init()
for step in ftcomm.steps(int(os.environ["STEPS"])):
    ftcomm.allreduce(np.ones(10, np.float32))
    if step == 5 and str(group.replica) in os.environ["GIVES_UP"]:
        exec(os.environ["HOW"])
    if step == 5 and os.environ["STEPS"] == "1000000" and not os.environ["GIVES_UP"]:
        break
if os.environ["STEPS"] == "5" and str(group.replica) in os.environ["GIVES_UP"]:
    exec(os.environ["HOW"])
"""


EXIT = "exited with code 3"
IMPORTED = EXIT if sys.version_info >= (3, 12) else "raised SystemExit before the end of a step loop"


@pytest.mark.parametrize(
    ("gives_up", "steps", "how", "said", "code"),
    [
        ("01", 1000000, "sys.exit(3)", EXIT, 3),
        ("0", 50, "sys.exit(3)", EXIT, 3),
        ("01", 1000000, "leave(3)", IMPORTED, 3),
        ("01", 1000000, "raise SystemExit(3)", EXIT, 3),
        ("01", 5, "raise SystemExit(3)", EXIT, 3),
        ("01", 1000000, "raise ValueError", "failed with ValueError", 1),
        ("", 1000000, "", EXIT, 0),
        ("", 50, "", EXIT, 0),
    ],
)
def test_a_script_that_gives_up_has_not_finished(
    shell: Shell, gives_up: str, steps: int, how: str, said: str, code: int
) -> None:
    """In the middle of a training both replicas give up, or one, or both behind it, or both end well, after `break`
    too."""
    shell.script(EXITS)
    argv = ("coordinator", "--replicas", "2", "--port", "0", "--store", "views", "--heartbeat-timeout", "5")
    command = shell.start(*argv, env={"FTCOMM_TOKEN": "a-secret-of-the-test"})
    assert command.stdout is not None
    endpoint = command.stdout.readline().split()[3].rstrip(",")
    place = {"FTCOMM_COORDINATOR": endpoint, "FTCOMM_REPLICAS": "2", "FTCOMM_HEARTBEAT_TIMEOUT": "5"}
    what = {"GIVES_UP": gives_up, "STEPS": str(steps), "FTCOMM_TOKEN": "a-secret-of-the-test", "HOW": how}
    what["FTCOMM_JOB"] = exported(command, "FTCOMM_JOB")
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=shell.directory,
            env={**os.environ, **place, **what, "FTCOMM_REPLICA": str(replica), MARK: str(shell.directory)},
        )
        for replica in range(2)
    ]
    codes = [rank.wait(DEADLINE) for rank in ranks]
    _, err = command.communicate(timeout=DEADLINE)
    assert codes == [code if str(replica) in gives_up else 0 for replica in range(2)]
    assert command.returncode == (1 if gives_up == "01" else 0), err
    assert (f"its script {said}" in err) == bool(gives_up), err
    assert ("no replica that holds the state" in err) == (gives_up == "01"), err
    assert ": finished" not in err  # nobody waits for one that has given up
