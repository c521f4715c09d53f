"""torch's store under `ftcomm run`: it answers as torch's own does, and what needs one works, also in a replica that
comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ftcomm.errors import InitError
from ftcomm.launch import Launcher, RunOptions, run
from ftcomm.torch.rendezvous import NoStore

SHORT = timedelta(milliseconds=200)

LONG = timedelta(seconds=30)  # on a busy machine five million bytes take longer than the short one


def get_soon(store: dist.Store, key: str) -> bytes:
    store.set_timeout(SHORT)
    try:
        return store.get(key)
    finally:
        store.set_timeout(LONG)


CALLS: list[tuple[str, Any]] = [
    ("set", lambda s: s.set("k", "v")),
    ("get", lambda s: s.get("k")),
    ("get of none", lambda s: get_soon(s, "none")),
    ("get after that", lambda s: s.get("k")),
    ("add", lambda s: [s.add("n", 3), s.add("n", -5), s.get("n")]),
    ("check", lambda s: [s.check(["k", "none"]), s.check(["k", "n"])]),
    ("wait", lambda s: s.wait(["k", "n"])),
    ("wait for none", lambda s: s.wait(["k", "none"], SHORT)),
    ("compare_set", lambda s: [s.compare_set(*x) for x in (("c", "x", "y"), ("c", "", "y"), ("c", "y", "z"))]),
    ("compare_set of another", lambda s: [s.compare_set("c", "y", "w"), s.get("c")]),
    ("append", lambda s: [s.append("a", "1"), s.append("a", "2"), s.get("a")]),
    ("multi_set", lambda s: [s.multi_set(["m", "l"], ["1", "22"]), s.multi_get(["l", "m", "k"])]),
    ("num_keys", lambda s: s.num_keys()),
    ("delete_key", lambda s: [s.delete_key("k"), s.delete_key("k"), s.check(["k"])]),
    ("queues", lambda s: [s.queue_push("q", "1"), s.queue_push("q", "2"), s.queue_len("q"), s.queue_pop("q")]),
    ("the rest", lambda s: [s.check(["q"]), s.queue_pop("q", False), s.queue_len("q"), s.check(["q"])]),
    ("an empty queue", lambda s: s.queue_pop("q", False)),
    ("clone", lambda s: s.clone().get("a")),
    ("large", lambda s: [s.set("large", "x" * 5_000_000), len(s.get("large"))]),
    ("list_keys", lambda s: sorted(s.list_keys())),
]


def answers(store: dist.Store) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, call in CALLS:
        try:
            found[name] = call(store)
        except AttributeError:  # this torch has no such call
            found[name] = None
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


SERVER = """
import asyncio, sys
from ftcomm.launch.torchrun.store import TorchStore

async def main():
    store = TorchStore("127.0.0.1", print)
    await store.start()
    print(store.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await store.close()

asyncio.run(main())
"""


@contextlib.contextmanager
def served() -> Iterator[int]:
    """The port of a store of ours. In a process of its own: torch holds the interpreter lock while it connects."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        yield int(server.stdout.readline())
        told, _ = server.communicate(timeout=60)
        assert told == ""
    finally:
        server.kill()
        server.wait()


def test_it_answers_as_torchs_own_does() -> None:
    real = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = []
    with served() as port:
        for each in (real.port, port):
            client = dist.TCPStore("127.0.0.1", each, 2, is_master=False, timeout=LONG)
            told.append(answers(client))
    assert told[1] == told[0]
    assert str(told[0]["get of none"]).startswith("DistStoreError")


def test_a_job_without_a_store_says_so_at_the_first_use() -> None:
    none = NoStore()
    store = dist.PrefixStore("default_pg", none)
    store.set_timeout(SHORT)  # torch does, at once
    for call in (lambda: store.set("k", "v"), lambda: store.get("k"), lambda: store.add("k", 1)):
        with pytest.raises(InitError, match=r"no store for torch.*Start it with `ftcomm run`"):
            call()


SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
import ftcomm

dist.init_process_group("ftcomm")
rank, back = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
replica, folder = rank // 2, sys.argv[1]
store = dist.distributed_c10d._get_default_store()
if not back:
    store.set(f"of {rank}", str(rank))
assert [store.get(f"of {other}") for other in range(4)] == [b"0", b"1", b"2", b"3"]

inside = None
for ranks in ([0, 1], [2, 3]):
    group = dist.new_group(ranks, backend="gloo")
    inside = group if rank in ranks else inside
x = torch.tensor([float(rank)])
dist.all_reduce(x, group=inside)
assert x.item() == 4 * replica + 1, x
if not back:  # who comes back makes groups of gloo with its own ranks alone
    everybody = dist.new_group(backend="gloo")
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=everybody)
    assert x.item() == 6, x
    dcp.save({"w": torch.ones(3)}, checkpoint_id=folder)
    dist.barrier()
print("met", rank, back, flush=True)
for step in ftcomm.steps(1_000_000, {"x": torch.zeros(1)}):
    time.sleep(0.01)
"""


def test_groups_of_gloo_user_keys_and_checkpoints(
    preforked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the replica that comes back, too: its ranks make their group anew, and find the keys of the script."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "script.py").write_text(SCRIPT)
    lines: list[str] = []
    launcher = Launcher(
        RunOptions(
            replicas=2,
            ranks_per_replica=2,
            script=str(tmp_path / "script.py"),
            args=(str(tmp_path / "saved"),),
            backoff=0.01,
        ),
        on_line=lambda replica, rank, line: lines.append(line),
        on_log=lines.append,
    )

    async def have_met(back: bool, *ranks: int) -> None:
        while not {f"met {rank} {back}" for rank in ranks} <= {*lines}:
            await asyncio.sleep(0.01)

    async def plan() -> None:
        await have_met(False, 0, 1, 2, 3)
        os.kill(launcher.pids()[1, 0], signal.SIGKILL)
        await have_met(True, 2, 3)
        launcher.interrupt()

    async def main() -> int:
        running = asyncio.ensure_future(launcher.run())
        await asyncio.wait({asyncio.ensure_future(plan()), running}, return_when=asyncio.FIRST_COMPLETED)
        return await running

    assert asyncio.run(asyncio.wait_for(main(), 200)) == run.DRAINED, lines
    assert (tmp_path / "saved" / ".metadata").exists()
