"""Ranks that fork: what their children do, and what becomes of the ranks."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import ftcomm

from .job import Notes

STEPS = 40
FORKER = 1
UNDER_WAY = 5  # the step in which an op is, when children make calls


def fork(notes: Notes, child: Any) -> int:
    """A child that runs `child()`, and then ends as scripts do, by the functions that were registered for that."""
    pid = os.fork()
    if pid == 0:
        multiprocessing.process._children.clear()  # type: ignore[attr-defined]  # of the parent
        try:
            child()
        except BaseException as error:
            notes.write(kind="child", type=type(error).__name__, text=str(error))
        begun = time.monotonic()
        atexit._run_exitfuncs()
        notes.write(kind="child-ends", after=time.monotonic() - begun)
        os._exit(0)
    return pid


def reduce_and_fork(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """All-reduces whose sums tell who is in them. In the midst of them one rank forks children of all kinds."""
    pair = group.subgroup("pair", [0, FORKER]) if group.replica in (0, FORKER) else None
    array = np.empty(arguments["elements"], np.float32)
    for step in ftcomm.steps(STEPS):
        array[:] = 2.0**group.replica
        if step == UNDER_WAY:
            asked = Path(arguments["marks"]) / "asked"
            while group.replica != FORKER and not asked.exists():
                time.sleep(0.01)
            started = group.allreduce(np.ones(10), async_op=True)
            if group.replica == FORKER:
                _calls(group, pair, started, notes)
                asked.touch()
            started.wait()
        elif group.replica == FORKER and step in CHILDREN:
            CHILDREN[step](group, pair, notes)
        group.allreduce(array)
        notes.write(kind="step", step=step, sums=sorted(set(array.tolist())), members=list(group.members))
        if pair is not None:
            assert pair.allreduce(np.ones(3))[0] == 2


def _calls(group: ftcomm.Group, pair: Any, started: Any, notes: Notes) -> None:
    """Each call is refused, in the child alone; none of them waits, though `started` is under way in the parent."""
    for name, call in {
        "allreduce": lambda: ftcomm.allreduce(np.full(2000, 100, np.float32)),
        "async": lambda: group.allreduce(np.full(2000, 100, np.float32), async_op=True),
        "barrier": group.barrier,
        "subgroup": lambda: pair.allreduce(np.ones(3)),
        "another subgroup": lambda: group.subgroup("another", [0, FORKER]),
        "send": lambda: group.send(np.ones(3), 0),
        "recv": lambda: group.recv(np.ones(3), 0),
        "boundary": lambda: group.boundary(1000),
        "leave": group.leave,
        "report": lambda: ftcomm.report(loss=1.0),
        "wait": started.wait,
        "init": lambda: ftcomm.groups.group.Group(group.settings),
    }.items():

        def child(name: str = name, call: Any = call) -> None:
            signal.alarm(60)
            try:
                call()
            except ftcomm.FtcommError as error:
                notes.write(kind="refused", call=name, text=str(error))

        os.waitpid(fork(notes, child), 0)
        if name in ("allreduce", "async", "barrier", "subgroup"):
            # While another thread is about to call, too: it is not there in the child, and lets go of nothing.
            turns = group._turn, pair._turn
            with turns[0]._starting, turns[1]._starting:
                os.waitpid(fork(notes, lambda child=child, name=name: child(f"{name}, held")), 0)


def _ends(group: ftcomm.Group, pair: Any, notes: Notes) -> None:
    """In every way in which children end."""

    def shut() -> None:
        ftcomm.shutdown()
        group.close()
        pair.close()

    def fail() -> None:
        raise ValueError("of the child")

    for child in (lambda: None, shut, fail, sys.exit):
        os.waitpid(fork(notes, child), 0)


def _others(group: ftcomm.Group, pair: Any, notes: Notes) -> None:
    """Who forks for scripts."""
    subprocess.run(["true"], check=True)
    subprocess.run(["true"], check=True, preexec_fn=lambda: None)  # runs the interpreter in the child
    pid, end = os.forkpty()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(end)
    _may_have_children()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        notes.write(kind="pool", found=pool.map(abs, [-1, -2]))
    loader = DataLoader(torch.arange(8.0), batch_size=2, num_workers=2, multiprocessing_context="fork")  # type: ignore[arg-type]
    notes.write(kind="loaded", found=sum(float(batch.sum()) for batch in loader))


CHILDREN = {15: _ends, 25: _others}


def _may_have_children() -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def reduce_with_workers(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Until it is killed, with children that outlive it."""
    if group.replica == FORKER:
        notes.write(kind="worker", pid=fork(notes, signal.pause))
        _may_have_children()
        loader = DataLoader(torch.arange(8.0), batch_size=2, num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
        batches = iter(loader)
        next(batches)
        notes.write(kind="worker", pid=batches._workers[0].pid)  # type: ignore[attr-defined]
    array = np.empty(1000, np.float32)
    for _ in ftcomm.steps(10**9):
        group.allreduce(array)
