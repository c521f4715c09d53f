"""`ftcomm status` as people read it."""

from __future__ import annotations

import io

from rich.console import Console

from ftcomm.launch.admin.protocol import ReplicaStatus, Status
from ftcomm.launch.commands.job import show


def shown(*replicas: ReplicaStatus) -> list[list[str]]:
    """Returns the words of its lines."""
    status = Status(
        run="a1b2",
        pid=1,
        script="train.py",
        epoch=3,
        draining=False,
        coordinator="10.0.0.1:29400",
        away=False,
        ranks_per_replica=2,
        transport="tcp",
        heartbeat_timeout=5.0,
        op_timeout=120.0,
        replicas=list(replicas),
    )
    text = io.StringIO()
    show(status, Console(file=text, width=200))
    return [line.translate(str.maketrans("│┃", "  ")).split() for line in text.getvalue().splitlines()]


def replica(number: int, host: str, **waits: float) -> ReplicaStatus:
    waits = {rank.removeprefix("rank"): seconds for rank, seconds in waits.items()}
    return ReplicaStatus(number, "running", 1, {"0": 11, "1": 12}, True, True, 41, host, waits=waits, reason="")


def test_several_hosts_are_a_column_and_the_rank_that_waits_longest_is_named() -> None:
    lines = shown(replica(0, "10.0.0.1", rank0=0.0, rank1=3.14), replica(1, "10.0.0.2", rank0=0.0, rank1=0.0))
    assert lines[0] == ["job", "a1b2", "(train.py),", "running,", "epoch", "3"]
    assert lines[2][:3] == ["replica", "host", "state"]
    assert "waits" in lines[2]
    assert lines[4][:4] == ["0", "10.0.0.1", "running", "contributes"]
    assert " ".join(lines[4]).endswith("41 3.1 s (shard 1) - 1 11 12")
    assert " ".join(lines[5]).endswith("41 - - 1 11 12")


def test_one_host_is_in_the_headline_and_nobody_who_waits_takes_no_room() -> None:
    lines = shown(replica(0, "127.0.0.1", rank0=0.0), replica(1, "127.0.0.1"))
    assert lines[0] == ["job", "a1b2", "(train.py)", "on", "127.0.0.1,", "running,", "epoch", "3"]
    assert not {"host", "waits"} & set(lines[2])
