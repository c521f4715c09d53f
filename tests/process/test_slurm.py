"""The batch scripts in examples/cluster in a real Slurm: its controller and the daemons of two nodes, on this
machine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process.several_hosts import SCRIPT
from tests.rigs.deadlines import DEADLINE
from tests.rigs.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"))
CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"

pytestmark = [
    pytest.mark.protocol,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(shutil.which(name, path=PATH) for name in PROGRAMS),
        reason="no Slurm, or not root: apt-get install slurmctld slurmd slurm-client munge",
    ),
]

CONFIGURATION = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=n0,n1 Default=YES State=UP
"""


def until(what: str, true: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.1)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs a command of this Slurm; returns what it prints."""
    host = socket.gethostname()
    (tmp_path / "state").mkdir()
    (tmp_path / "key").write_bytes(os.urandom(1024))
    (tmp_path / "key").chmod(0o600)
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=host, folder=tmp_path, ports=[free_port() for _ in range(3)]),
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FTCOMM_", "SLURM_"))}
    env |= {"PATH": PATH, "SLURM_CONF": str(configuration), "OMP_NUM_THREADS": "1"}

    def command(*line: str) -> str:
        done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    files = [f"--{name}={tmp_path}/{path}" for name, path in (("socket", "munge.sock"), ("key-file", "key"))]
    files += [f"--{name}-file={tmp_path}/munge.{name}" for name in ("pid", "log", "seed")]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for line in (
            ["munged", "--foreground", "--force", *files],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", "n0"],
            ["slurmd", "-D", "-N", "n1"],
        ):
            with (tmp_path / "daemons.log").open("ab") as log:
                daemons.append(subprocess.Popen(line, cwd=tmp_path, env=env, stdout=log, stderr=log))
            if line[0] == "munged":
                until("munged serves", (tmp_path / "munge.sock").exists)
        until("both nodes are there", lambda: nodes(tmp_path, env) == 2)
        yield command
    finally:
        subprocess.run(["scancel", "--signal=KILL", "--user=root"], env=env, capture_output=True, timeout=DEADLINE)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(DEADLINE)


def nodes(folder: Path, env: dict[str, str]) -> int:
    found = subprocess.run(["sinfo", "--noheader", "--Node"], cwd=folder, env=env, capture_output=True, text=True)
    return found.stdout.count(" idle")


def launcher_of_host_1(port: str) -> int:
    """Returns its pid, and not that of the srun that has asked for it."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        is_host_1 = "--node-rank" in line and line[line.index("--node-rank") + 1] == "1"
        if is_host_1 and "srun" not in line[0] and any(part.endswith(port) for part in line):
            return int(folder.name)
    raise AssertionError("there is no launcher of host 1")


@pytest.mark.shows("Slurm", "NumPy arrays", "RSJE")
def test_the_launcher_of_a_node_dies_and_slurm_starts_it_again(tmp_path: Path, slurm: Callable[..., str]) -> None:
    port, out = f":{free_port()}", tmp_path / "out"
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "job.sbatch").write_text((CLUSTER / "slurm-run.sbatch").read_text().replace(":29400", port))
    slurm("sbatch", "--nodes=2", "--gpus-per-node=0", f"--output={out}", "job.sbatch", "train.py")

    def says(pattern: str, after: int = 0) -> Callable[[], object]:
        return lambda: re.search(pattern, out.read_text()[after:] if out.exists() else "", re.MULTILINE)

    until("all four train", says("^.3. step .* with 4"))
    said = len(out.read_text())
    os.kill(launcher_of_host_1(port), signal.SIGKILL)
    until("two train on", says("^.0. step .* with 2", said))
    said = len(out.read_text())
    until("all four train again", says("^.3. step .* with 4", said))
    (tmp_path / "enough").touch()
    until("the job is over", lambda: "JobState=RUNNING" not in slurm("scontrol", "show", "job"))
    assert "JobState=COMPLETED" in slurm("scontrol", "show", "job"), out.read_text()[-3000:]
    ends = re.findall(r"^.\d. ended (.*)$", out.read_text(), re.MULTILINE)
    assert (len(ends), len(set(ends))) == (4, 1), "replicas differ"


def test_a_rank_and_its_torchrun_die_and_come_back(tmp_path: Path, slurm: Callable[..., str]) -> None:
    out = tmp_path / "out"
    (tmp_path / "train.py").write_text(SCRIPT.replace('print("step"', 'print("replica", group.replica, "step"'))
    batch = (CLUSTER / "slurm.sbatch").read_text()
    here = {"29400": str(free_port()), "29401": str(free_port()), "ranks=8": "ranks=1", '--gpus-per-node="$ranks"': ""}
    for theirs, ours in here.items():
        assert theirs in batch
        batch = batch.replace(theirs, ours)
    (tmp_path / "job.sbatch").write_text(batch)
    slurm("sbatch", "--nodes=2", "--gpus-per-node=0", f"--output={out}", "job.sbatch", "train.py")

    def steps(with_: int, after: int = 0, replica: int = 1) -> list[str]:
        text = out.read_text()[after:] if out.exists() else ""
        return re.findall(rf"^replica {replica} step .* of (\d+) with {with_}$", text, re.MULTILINE)

    for whose in ("its rank", "its torchrun"):
        until(f"both train, before {whose} is killed", lambda: steps(2))
        rank = int(steps(2)[-1])
        stat = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()
        said = len(out.read_text())
        os.kill(rank if whose == "its rank" else int(stat[1]), signal.SIGKILL)
        until("one trains on", lambda said=said: steps(1, said, replica=0))
        until("both train again", lambda said=said, rank=rank: {*steps(2, said)} - {str(rank)})
    (tmp_path / "enough").touch()
    until("the job is over", lambda: "JobState=RUNNING" not in slurm("scontrol", "show", "job"))
    assert "JobState=COMPLETED" in slurm("scontrol", "show", "job"), out.read_text()[-3000:]
    ends = re.findall(r"^ended (.*)$", out.read_text(), re.MULTILINE)
    assert (len(ends), len(set(ends))) == (2, 1), "replicas differ"
