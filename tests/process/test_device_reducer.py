"""Jobs that the host drives and kernels reduce for, in Triton's interpreter: real processes, real kills, any transport.

The rest of the protocol suite runs so, too: what of it is over TCP and NIXL, in `make test-kernels`.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcomm
from ftcomm.collective import algorithms
from ftcomm.collective.plan import GroupView
from ftcomm.kernels.device import INTERPRETED
from ftcomm.settings import Settings

from .bodies import reduce_forever
from .job import Job, Notes
from .test_kills import ENDLESS, SEED, check

pytestmark = pytest.mark.protocol

if not INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)

ONE_SHOT = 3000  # elements of fp32
TWO_SHOT = 30_000
ROUTED = 80_001  # by two levels, if some share hosts; around the ring, if there is one


def job(folder: Path, replicas: int, body: Any, transport: str = "tcp", **arguments: Any) -> Job:
    return Job(folder, replicas=replicas, body=body, engine="interpreter-reduce", transport=transport, **arguments)


def apart(settings: Settings) -> None:
    """A boot id for every two replicas: those share memory, and reach the others by TCP."""
    from ftcomm.control.views import Address
    from ftcomm.groups import communicator

    here_is, boot = communicator.here_is, f"boot {settings.replica // 2}"

    def here(*of: Any) -> Address:
        address = here_is(*of)
        return Address(**{name: getattr(address, name) for name in address.__struct_fields__} | {"boot": boot})

    communicator.here_is = here  # type: ignore[assignment]


def count_kernels(settings: Settings, arguments: dict[str, Any]) -> None:
    """Of which dtypes kernels of this rank reduce something, in `names`, ops of how many bytes are `routed`, and how
    many memories are `mapped` for kernels."""
    from ftcomm.engines.gpu_reduce.interpreted import InterpretedReduceDevice

    real, by_route = InterpretedReduceDevice.reduce, algorithms.by_route
    arguments["names"], arguments["routed"] = set(), set()

    def reduce(self: InterpretedReduceDevice, spans: Any, *rest: Any) -> None:
        arguments["names"].add(spans[0].dtype)
        arguments["mapped"] = len(self._mapped)
        real(self, spans, *rest)

    def routed(nbytes: int, view: GroupView) -> bool:
        found = by_route(nbytes, view)
        if found:
            arguments["routed"].add(nbytes)
        return found

    InterpretedReduceDevice.reduce = reduce  # type: ignore[method-assign]
    algorithms.by_route = routed
    if arguments["by_hosts"]:
        apart(settings)


def all_calls(group: ftcomm.Group, notes: Notes, arguments: dict[str, Any]) -> None:
    """Calls of several kinds, whose results everybody can tell; what kernels have had to do with them."""
    me, n = group.replica, len(group.members)
    for count, dtype in ((ONE_SHOT, np.float32), (ROUTED, np.float32), (TWO_SHOT, np.int16), (1, np.float64)):
        x = np.arange(count, dtype=dtype) % 50 + me
        group.allreduce(x)
        want = (np.arange(count, dtype=dtype) % 50) * n + n * (n - 1) // 2
        if not np.array_equal(x, want.astype(dtype)):
            notes.write(kind="wrong", count=count, dtype=str(x.dtype), got=str(x[:5]), want=str(want[:5]))
    import torch

    half = torch.full((TWO_SHOT,), float(me), dtype=torch.bfloat16)
    group.allreduce(half, "max", compression=arguments.get("wire"))
    coded = np.full(TWO_SHOT, 2.0**me, np.float32)
    group.allreduce(coded, compression="fp8")
    bits = np.full(7, 1 << me, np.uint32)
    group.allreduce(bits, "bor")
    part = np.empty(100, np.float32)
    group.reduce_scatter(part, np.arange(100 * n, dtype=np.float32))
    told = np.zeros(3) if me else np.arange(3.0)
    group.broadcast(told, 0)
    right = (
        bool((half == n - 1).all())
        and bool((coded == 2.0**n - 1).all())
        and bool((bits == (1 << n) - 1).all())
        and np.array_equal(part, n * (np.arange(100, dtype=np.float32) + 100 * me))
        and told.tolist() == [0.0, 1.0, 2.0]
    )
    told = {name: sorted(arguments[name]) for name in ("names", "routed")}
    notes.write(kind="done", right=right, mapped=arguments["mapped"], **told)


@pytest.mark.parametrize(
    ("replicas", "transport", "algorithm", "by_hosts"),
    [(3, "tcp", "auto", False), (2, "auto", "auto", False), (3, "tcp", "ring", False), (4, "auto", "auto", True)],
    ids=["tcp", "one host", "ring", "two hosts"],
)
def test_kernels_reduce_what_the_host_moves(
    tmp_path: Path, replicas: int, transport: str, algorithm: str, by_hosts: bool
) -> None:
    """By TCP or shared memory alone, around a ring, and by both, where large ops go by two levels. Kernels reach their
    own segment and what was received, and no segment of another process."""
    how = dict(prepare=count_kernels, algorithm=algorithm, by_hosts=by_hosts)
    with job(tmp_path, replicas, all_calls, transport, **how) as running:
        for replica in range(running.replicas):
            assert running.join(replica) == [0], running.errors()
        notes = [note for _, _, note in running.notes() if note["kind"] in ("done", "wrong")]
    assert [note["kind"] for note in notes] == ["done"] * running.replicas, notes
    assert all(note["right"] for note in notes), notes
    names = ["bfloat16", "float32", "float64", "int16", "uint32"]
    assert [note["mapped"] for note in notes] == [1 if replicas == 2 else 3] * replicas, notes
    assert set().union(*(note["names"] for note in notes)) == set(names), notes
    assert all((4 * ROUTED in note["routed"]) == (by_hosts or algorithm == "ring") for note in notes), notes


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_kills_at_random_moments(tmp_path: Path, algorithm: str) -> None:
    """Atomic ops and others, in mid-op: equal bytes on the survivors, no step lost, and who died comes back."""
    rng = random.Random(SEED)
    with job(tmp_path, 3, reduce_forever, elements=TWO_SHOT, steps=ENDLESS, algorithm=algorithm) as running:
        running.wait_contributing({0, 1, 2})
        for _ in range(3):
            time.sleep(rng.uniform(0.1, 0.3))
            seen, victim = len(running.events), rng.randrange(3)
            running.kill(victim)
            running.start(victim)
            running.wait_contributing({0, 1, 2}, since=seen)
        running.drain()
        for replica in range(3):
            assert running.join(replica) == [0], running.errors()
        steps = check(running)
    assert any(len(notes) == 3 for notes in steps.values())


def reduce_by_host(settings: Settings, arguments: dict[str, Any]) -> None:
    if settings.replica == 1:
        object.__setattr__(settings, "engine", "host")


def test_who_reduces_otherwise_is_told_so(tmp_path: Path) -> None:
    """One has other NaNs than the other, so they do not begin, though their staging is of one shape."""
    with job(tmp_path, 3, reduce_forever, elements=10, steps=ENDLESS, prepare=reduce_by_host) as running:
        assert running.join(1) == [1]
        [(_, _, text)] = running.errors()
    assert "is that of engine interpreter-reduce, " in text, text
    assert "Set FTCOMM_ENGINE, FTCOMM_TRANSPORT and FTCOMM_DATA to the same on all ranks" in text


def raise_in_a_kernel(settings: Settings, arguments: dict[str, Any]) -> None:
    from ftcomm.engines.gpu_reduce.interpreted import InterpretedReduceDevice

    if settings.replica == 1:
        InterpretedReduceDevice.reduce = broken  # type: ignore[method-assign]


def broken(self: Any, *rest: Any) -> None:
    raise ftcomm.FtcommError("the GPU cannot reduce: it is broken")


def test_a_device_that_fails_ends_its_rank_alone(tmp_path: Path) -> None:
    with job(tmp_path, 3, reduce_forever, elements=TWO_SHOT, steps=ENDLESS, prepare=raise_in_a_kernel) as running:
        assert running.join(1) == [1]
        [(_, _, text)] = running.errors()
        assert "the GPU cannot reduce: it is broken" in text, text
        running.wait_contributing({0, 2})
        running.drain()
        assert running.join(0) == running.join(2) == [0], running.errors()
        check(running)
