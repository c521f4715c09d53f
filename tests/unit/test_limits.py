"""Limits have names: what is beyond one is refused where it enters, with the limit and the mend."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcomm.collective.operation import Operation
from ftcomm.collective.plan import GroupView
from ftcomm.control import join_terms, links, wire
from ftcomm.control import messages as m
from ftcomm.control.coordinator import Coordinator
from ftcomm.control.coordinator_actions import Log, Persist, Send
from ftcomm.control.join_terms import too_large
from ftcomm.control.limits import IN_FLIGHT, MEMBERS, RANKS
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.view_differences import ViewsSent
from ftcomm.control.views import Address, Addresses
from ftcomm.errors import ArgumentError, SettingsError, TransportError
from ftcomm.launch.coordinator.command import CoordinatorOptions
from ftcomm.launch.options import RunOptions
from ftcomm.process import descriptors
from ftcomm.settings import Settings
from tests.rigs.exchange import DEADLINE, Rig

TIMEOUTS = Timeouts.derive()


def test_ops_in_flight() -> None:
    """As many as an account can tell of, which everybody can read; one more is refused, and nothing else happens."""
    with Rig((0, 1)) as rig:
        rig.view((0, 1))
        exchange = rig.members[0].exchange
        ops = [Operation(np.ones(1, np.float32), "float32", "sum") for _ in range(IN_FLIGHT)]
        for op in ops:
            exchange.submit(op)
        for call in (exchange.submit, exchange.run):
            with pytest.raises(ArgumentError, match=f"{IN_FLIGHT} ops of this group are in flight"):
                call(Operation(np.ones(1, np.float32), "float32", "sum"))
        quiesced = threading.Event()
        exchange.freeze(quiesced.set)
        while not quiesced.wait(0.001):
            exchange.wake()
        account = m.MemberProgress(0, "life", 1, exchange.progress())
        assert len(m.encode(account)) < wire.MAX_MESSAGE
        assert m.decode(m.encode(account)) == account
        rig.view((0,))
        for op in ops:
            assert op.wait(DEADLINE)
            assert op.error is None
        exchange.run(last := Operation(np.ones(1, np.float32), "float32", "sum"))
        assert last.error is None


@pytest.mark.parametrize(
    ("replicas", "ranks", "said"), [(MEMBERS + 1, 1, "at most 1024"), (1, RANKS + 1, "at most 65536")]
)
def test_replicas_and_ranks(replicas: int, ranks: int, said: str) -> None:
    made: list[Any] = [
        CoordinatorOptions(replicas=replicas, ranks_per_replica=ranks, token="secret"),
        Settings("127.0.0.1:1", "secret", 0, replicas, 0, ranks_per_replica=ranks, leader="127.0.0.1:2"),
        RunOptions(replicas, "true", ranks_per_replica=ranks),
    ]
    for options in made:
        with pytest.raises(SettingsError, match=said):
            options.check()


def test_the_command_line_refuses_a_replica_more() -> None:
    command = [sys.executable, "-c", "from ftcomm.cli import main; main()", "run", "--replicas", "1025", "x.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230)
    assert done.returncode != 0
    assert "1025 replicas; a job has at most 1024" in done.stderr


def test_a_ring() -> None:
    members = tuple(range(MEMBERS + 1))
    with pytest.raises(ValueError, match="a ring of 1025 members; a group has at most 1024"):
        GroupView(1, 0, members, frozenset(members), ring=members)


def _join(replica: int, ranks: int) -> m.Join:
    address = Address("h" * 200, 1, "b" * 36, 1, 3, "0" * 32, "l" * 60, "", "t" * 60, "a" * 60)
    return m.Join(
        replica, "life", Addresses.of((address,) * ranks), epoch=0, step=-1, timeouts=dataclasses.astuple(TIMEOUTS)
    )


def test_a_view_that_no_message_can_carry() -> None:
    """Who comes to such a job is told so; before, the view was not sent, and all waited."""
    replicas, ranks = 16, 60_000
    coordinator = Coordinator(replicas, ranks, TIMEOUTS, views=[], now=0.0, lifetime=1)
    actions = coordinator.receive(0, _join(0, ranks), now=1.0)
    told = [action.message for action in actions if isinstance(action, Send)]
    assert any(isinstance(action, Log) and action.kind == "refused" for action in actions)
    assert isinstance(told[0], m.Removed)
    assert f"a message has at most {wire.MAX_MESSAGE}" in told[0].reason


def test_what_is_admitted_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """With messages of a megabyte, so that the job is small."""
    most = 1 << 20
    monkeypatch.setattr(join_terms, "MAX_MESSAGE", most)
    replicas = 16
    ranks = next(n for n in range(4000, 100, -100) if not too_large(_join(0, n), replicas))
    coordinator = Coordinator(replicas, ranks, TIMEOUTS, views=[], now=0.0, lifetime=1)
    actions: list[Any] = []
    for replica in range(replicas):
        actions += coordinator.receive(replica, _join(replica, ranks), now=1.0)
    (view,) = [action.view for action in actions if isinstance(action, Persist)]
    told = m.encode(ViewsSent().shorten(m.NewView(view)))
    assert most * 3 // 4 < len(told) <= most


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = [(256, 4096)]
    monkeypatch.setattr(os, "listdir", lambda path: ["0"] * 100)  # of which this process may have more by then
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, both: limits.append(both))
    descriptors.room_for(12, "a small group")
    assert len(limits) == 1
    descriptors.room_for(765, "a large group")
    assert limits[-1] == (4096, 4096)
    limits[:] = [(256, 800)]
    with pytest.raises(TransportError, match=r"a large group needs up to 8\d\d .* have 800; .*ulimit -n"):
        descriptors.room_for(765, "a large group")
    assert limits == [(256, 800)]


def test_a_static_group_and_the_leader_of_many_ranks_ask_for_them_first() -> None:
    """In a process of its own, whose limit is the kernel's. Each rank of a replica holds a connection to its leader."""
    script = """
import resource
from ftcomm.errors import TransportError
from ftcomm.groups.group import Group
from ftcomm.settings import Settings
from ftcomm.groups.static_endpoint import Endpoint
from ftcomm.groups.static_group import StaticGroup
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
endpoint = Endpoint()
others = [endpoint.handle.replace(f":{endpoint.port}/", f":{port}/") for port in range(1, 256)]
try:
    StaticGroup.from_handles(endpoint, "many", [endpoint.handle, *others], timeout=30.0)
except TransportError as error:
    print(error)
endpoint.close()
try:
    Group(Settings("127.0.0.1:1", "secret", 0, 12, 0, ranks_per_replica=8192, leader="127.0.0.1:2"))
except TransportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=230)
    assert "group 'many' of 256 members needs up to 8" in done.stdout, done.stderr
    assert "may have 512" in done.stdout
    assert "replica 0 shard 0 needs up to 82" in done.stdout
    assert "open files, and this process may have 512; raise the limit (ulimit -n 82" in done.stdout


@pytest.mark.parametrize("replicas", [12, MEMBERS])
def test_a_coordinator_asks_for_them_first(replicas: int) -> None:
    """It would start, and then have no room for some of the leaders."""
    script = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); "
    script += "from ftcomm.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "coordinator", "--replicas", str(replicas)],
        capture_output=True,
        text=True,
        timeout=230,
        env={**os.environ, "FTCOMM_TOKEN": "a token that is long enough"},
    )
    assert done.returncode != 0
    assert f"ftcomm coordinator, of a job with {replicas} replicas, needs up to" in done.stderr
    assert "and this process may have 256; raise the limit (ulimit -n" in done.stderr


def test_free_threaded_python() -> None:
    script = "import sys; sys._is_gil_enabled = lambda: False; import ftcomm"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=230)
    assert done.returncode != 0
    assert "ImportError: ftcomm needs the interpreter lock" in done.stderr
    assert "PYTHON_GIL=1" in done.stderr


@pytest.mark.parametrize(
    ("error", "said"), [("thread", "ulimit"), ("memory", "ulimit"), ("defect", "please report it")]
)
def test_a_control_thread_that_lacks_threads_or_memory_says_which_limits_to_raise(error: str, said: str) -> None:
    """With the errors that Python raises for it, in a process that may have no more memory."""
    script = f"""
import resource, threading
from ftcomm.control.rank_errors import why_broken
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20),) * 2)
def defect(): raise KeyError("a")
try:
    {{"thread": threading.Thread(target=print).start, "memory": lambda: bytes(1 << 30), "defect": defect}}[{error!r}]()
except BaseException as error:
    print(why_broken(error))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE)
    assert said in done.stdout, done.stdout + done.stderr


SOMAXCONN = Path("/proc/sys/net/core/somaxconn")  # the most that a port keeps on this host


@pytest.mark.skipif(int(SOMAXCONN.read_text()) < 2 * MEMBERS, reason="sysctl net.core.somaxconn is lower")
def test_a_port_keeps_what_all_members_dial_for_a_process_that_is_busy() -> None:
    """As all do when one joins. A connection that finds no place would look like a host that is gone."""
    descriptors.room_for(2 * MEMBERS, "this test")
    with contextlib.ExitStack() as made:
        port = made.enter_context(links.listen("127.0.0.1", 0))
        for _ in range(2 * MEMBERS):
            made.enter_context(socket.create_connection(port.getsockname(), timeout=DEADLINE))
