"""What a user did wrong is an error that says so, on every rank, and within seconds."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ftcomm
from ftcomm.control import handshake
from ftcomm.control.timeouts import Timeouts
from ftcomm.settings import Settings

from .bodies import calls, reduce_forever, skip_once
from .job import JOB, TOKEN, Job, only_on_host

pytestmark = pytest.mark.protocol


def outcomes(job: Job, replica: int) -> list[dict[str, object]]:
    return [note for r, _, note in job.notes() if r == replica and note["kind"] == "call"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_different_calls_are_an_error_on_all_that_shows_both(tmp_path: Path, transport: str) -> None:
    """Another count, type, op and size, each followed by a call that is right again."""
    right = (1000, "float32", "sum")
    wrong = [(999, "float32", "sum"), (1000, "float64", "sum"), (1000, "float32", "max"), (9_000_000, "float32", "sum")]
    mixed = [right, *(call for each in wrong for call in (each, right))]
    plan = {0: [right] * len(mixed), 1: [right] * len(mixed), 2: mixed}
    with Job(tmp_path, replicas=3, body=calls, transport=transport, calls=plan) as job:
        for replica in range(3):
            assert job.join(replica) == [0], job.errors()
            seen = outcomes(job, replica)
            assert seen[::2] == [{"kind": "call", "value": 3.0}] * (1 + len(wrong)), "the group does not go on"
            for number, (mismatch, (count, dtype, op)) in enumerate(zip(seen[1::2], wrong, strict=True)):
                assert mismatch["error"] == "MismatchError"
                text = str(mismatch["text"])
                assert f"replicas 0, 1: op {2 * number + 1}, allreduce(op='sum') of 1000 x float32" in text
                assert f"replica 2: op {2 * number + 1}, allreduce(op='{op}') of {count} x {dtype}" in text


@pytest.mark.parametrize(("transport", "elements"), [("shm", 4), ("shm", 400_000), ("tcp", 4)])
def test_a_call_that_one_replica_skips_is_told_at_once(tmp_path: Path, transport: str, elements: int) -> None:
    """Its next call is equal in shape, so nothing but the step tells that it is another one."""
    only_on_host("a comparison of steps")
    arguments: dict[str, Any] = dict(elements=elements, skip=5)
    with Job(tmp_path, replicas=3, body=skip_once, transport=transport, **arguments) as job:
        for replica in range(3):
            assert job.join(replica) == [0], job.errors()
            *right, last = outcomes(job, replica)
            assert [note["value"] for note in right] == [0.0, 1.0, 2.0, 3.0, 4.0]
            text = str(last["text"])
            assert f"op 6, allreduce(op='avg') of {elements} x float32, was called at different steps" in text
            assert "replicas 0, 2 at step 5, replica 1 at step 6. One of them has skipped a call" in text


def settings(**changes: object) -> Settings:
    base = Settings(coordinator="127.0.0.1:1", token=TOKEN, job=JOB, replica=0, replicas=1, init_timeout=4.0)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_no_coordinator_says_where_and_how_long() -> None:
    with pytest.raises(ftcomm.InitError, match=r"coordinator at 127.0.0.1:1 cannot be reached .*waited 4 s"):
        ftcomm.init(settings())


def test_wrong_token_is_said_at_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No refusal of who does not hold the token ends anything: it may be a stranger's."""
    job = Job(tmp_path, replicas=2, body=calls, calls={})
    try:
        with pytest.raises(ftcomm.InitError, match=r"FTCOMM_TOKEN.*waited 2 s"):
            ftcomm.init(settings(coordinator=job.server.endpoint, token="guess", init_timeout=2.0))
    finally:
        job.__exit__(None, None, None)
    assert len([record for record in caplog.records if "cannot be reached (wrong token" in record.message]) == 1


def test_another_version_is_said_with_both() -> None:
    with socket.create_server(("127.0.0.1", 0)) as port:

        def serve() -> None:
            while True:
                conn, _ = port.accept()
                with conn:
                    conn.recv(4096)
                    data = msgspec.msgpack.encode(handshake.Challenge(handshake.VERSION + 1, b"n" * 16))
                    conn.sendall(len(data).to_bytes(4, "big") + data)
                    conn.recv(4096)

        threading.Thread(target=serve, daemon=True).start()
        endpoint = f"127.0.0.1:{port.getsockname()[1]}"
        with pytest.raises(ftcomm.InitError, match=f"version {handshake.VERSION + 1}, expected {handshake.VERSION}"):
            ftcomm.init(settings(coordinator=endpoint, init_timeout=2.0))


def test_missing_replicas_are_named(tmp_path: Path) -> None:
    job = Job(tmp_path, replicas=3, body=calls, calls={})
    try:
        with pytest.raises(ftcomm.InitError, match=r"1 of 3 replicas are here; missing: 0, 2"):
            ftcomm.init(
                settings(coordinator=job.server.endpoint, replica=1, replicas=3, timeouts=Timeouts.derive(60.0, 10.0))
            )
    finally:
        job.__exit__(None, None, None)


def _refuse_as_leader(settings: Settings, arguments: dict[str, Any]) -> None:
    """Rank 0 of replica 1 has a wrong setting, and finds that when all others run."""
    marks = Path(arguments["marks"])
    (marks / f"runs-{settings.replica}-{settings.shard}").touch()
    if (settings.replica, settings.shard) != (1, 0):
        return
    while len(list(marks.glob("runs-*"))) < 4:
        time.sleep(0.01)
    names = {
        "COORDINATOR": settings.coordinator,
        "TOKEN": settings.token,
        "JOB": settings.job,
        "TRANSPORT": "bogus",
        "REPLICA": "1",
    }
    for name, value in (*names.items(), ("REPLICAS", "2"), ("SHARD", "0"), ("LEADER", settings.leader)):
        os.environ[f"FTCOMM_{name}"] = value
    ftcomm.init()


def test_all_are_told_of_a_leader_that_cannot_start(tmp_path: Path) -> None:
    """Also the other rank of its replica, which knows the coordinator only by its address."""
    with Job(tmp_path, replicas=2, ranks=2, heartbeat_timeout=3.0, prepare=_refuse_as_leader, body=calls) as job:
        for replica in (0, 1):
            assert job.join(replica) == [1, 1]
        ends = {(replica, rank): note for replica, rank, note in job.notes()}
    wrong = "replica 1 shard 0 cannot start: FTCOMM_TRANSPORT='bogus'"
    assert ends.pop((1, 0))["type"] == "SettingsError"
    assert len(ends) == 3
    for end in ends.values():
        assert end["type"] == "InitError"
        assert wrong in end["text"]


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    job = Job(tmp_path, replicas=2, ranks=2, body=calls, calls={})
    try:
        with pytest.raises(ftcomm.InitError, match="FTCOMM_RANKS_PER_REPLICA"):
            ftcomm.init(settings(coordinator=job.server.endpoint, replicas=2, init_timeout=60.0))
    finally:
        job.__exit__(None, None, None)


def test_two_coordinators_of_one_job(tmp_path: Path) -> None:
    with Job(tmp_path, replicas=1, body=reduce_forever, elements=10, steps=10_000_000) as job:
        job.wait_contributing({0})
        with pytest.raises(Exception, match="another coordinator"):
            job.do(job._server(0).start())


def test_a_process_without_address_space_is_told_so() -> None:
    """What it cannot load first is the codec of names, of which nobody has heard."""
    script = """
import resource, sys
import ftcomm.transport.address
for name in ("encodings.idna", "stringprep", "unicodedata"):
    sys.modules.pop(name, None)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size, size))
ftcomm.transport.address.own_address("", ("127.0.0.1", 1), "FTCOMM_COORDINATOR")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=230, check=False)
    assert "InitError: the name '127.0.0.1' cannot be looked up" in ended.stderr, ended.stderr
    assert "MB (RLIMIT_AS) here. Raise it (ulimit -v)" in ended.stderr
