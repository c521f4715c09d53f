"""The c10d reconfigure contract: made anew from handles, aborted, recovered; by threads of one process, as the suites
of others do, and by torchft's own worker where torchft is installed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from ftcomm.errors import ArgumentError, FtcommError, LostError, TransportError
from ftcomm.torch import versions
from ftcomm.torch.reconfigure import ReconfigurableGroup
from ftcomm.torch.work import FtWork

from ..process.job import DEADLINE

UUIDS = itertools.count(1)
SECONDS = 20.0


@pytest.fixture
def groups() -> Iterator[list[ReconfigurableGroup]]:
    made = [ReconfigurableGroup(rank, 3, SECONDS, name=f"rank {rank}") for rank in range(3)]
    yield made
    for group in made:
        group.shutdown()


def together(groups: list[Any], body: Callable[[Any], Any]) -> list[Any]:
    """`body` of each in a thread of its own."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(body, groups))


def options(groups: list[ReconfigurableGroup], uuid: int | None = None, seconds: float = SECONDS) -> Any:
    return SimpleNamespace(
        uuid=next(UUIDS) if uuid is None else uuid,
        handles=[group.get_reconfigure_handle() for group in groups],
        timeout=timedelta(seconds=seconds),
        hints={},
    )


def reconfigure(groups: list[ReconfigurableGroup], **how: Any) -> None:
    asked = options(groups, **how)
    together(groups, lambda group: group.reconfigure(asked).wait())


def summed(group: ReconfigurableGroup) -> float:
    x = torch.full((1000,), float(group.rank() + 1))
    group.allreduce([x]).wait()
    return float(x.sum() / 1000)


def test_size_and_ranks_follow_every_reconfiguration(groups: list[ReconfigurableGroup]) -> None:
    handles = [group.get_reconfigure_handle() for group in groups]
    for members in ([0, 1, 2], [2, 0], [1, 2, 0]):
        chosen = [groups[member] for member in members]
        reconfigure(chosen)
        assert [group.rank() for group in chosen] == list(range(len(members)))
        assert {group.size() for group in chosen} == {len(members)}
        assert together(chosen, summed) == [sum(range(1, len(members) + 1))] * len(members)
    assert [group.get_reconfigure_handle() for group in groups] == handles
    assert all(type(handle) is str for handle in handles)


def test_of_a_set_of_handles_all_make_the_same_order(groups: list[ReconfigurableGroup]) -> None:
    asked = options(groups)
    asked.handles = set(asked.handles)
    together(groups, lambda group: group.reconfigure(asked).wait())
    assert sorted(group.rank() for group in groups) == [0, 1, 2]


def test_an_abort_ends_ops_in_flight_everywhere_and_is_mended(groups: list[ReconfigurableGroup]) -> None:
    reconfigure(groups)
    heard: list[str] = []
    groups[0].register_abort_hook(1, lambda: heard.append("first"))
    groups[0].register_abort_hook(2, lambda: heard.append("second"))
    groups[0].unregister_abort_hook(2)
    waiting = [group.allreduce([torch.ones(10)]) for group in groups[1:]]
    groups[0].abort()
    assert heard == ["first"]
    for work in waiting:
        with pytest.raises(LostError, match="aborted"):
            work.wait()
    with pytest.raises(LostError):
        groups[0].allreduce([torch.ones(10)]).wait()
    with pytest.raises(RuntimeError, match=r"LostError: .*aborted"):  # by the future too: nobody waits for ever
        groups[1].allreduce([torch.ones(10)]).get_future().wait()
    reconfigure(groups)
    assert together(groups, summed) == [6.0] * 3


def test_the_end_of_a_member_ends_the_ops_of_the_others(groups: list[ReconfigurableGroup]) -> None:
    reconfigure(groups)
    work = groups[1].allreduce([torch.ones(10)])
    groups[0].shutdown()
    with pytest.raises(LostError, match="Connection closed by peer: rank 0 "):  # gloo's words
        work.wait()
    reconfigure(groups[1:])
    assert together(groups[1:], summed) == [3.0] * 2


def test_mistakes(groups: list[ReconfigurableGroup]) -> None:
    with pytest.raises(FtcommError, match="has no members yet"):
        groups[0].allreduce([torch.ones(1)])
    reconfigure(groups, uuid=10_001)
    with pytest.raises(ArgumentError, match="uuid 10001 was already used"):
        groups[0].reconfigure(options(groups, uuid=10_001)).wait()
    with pytest.raises(TransportError, match="rank 1"):
        groups[0].reconfigure(options(groups[:2], seconds=0.3)).wait()
    groups[0].shutdown()
    with pytest.raises(FtcommError, match="does not exist any more"):
        groups[0].allreduce([torch.ones(1)])


@pytest.mark.skipif(not versions.RECONFIGURE, reason="torch has no dist._reconfigure before 2.14")
def test_errors_as_torch_names_them(groups: list[ReconfigurableGroup]) -> None:
    from torch._C._distributed_c10d import ErrorType

    assert groups[0].get_error() == ErrorType.SUCCESS
    reconfigure(groups)
    groups[0].abort()
    assert groups[0].get_error() == ErrorType.COMM_ERROR
    reconfigure(groups)
    assert groups[0].get_error() == ErrorType.SUCCESS


@pytest.mark.skipif(not versions.RECONFIGURE, reason="torch has no dist._reconfigure before 2.14")
def test_the_worker_of_torchft_passes() -> None:
    """`torchft.reconfigure_test` from its wheel: 3 ranks, 2 of them in another order, 3 again, an abort, a recovery."""
    worker = pytest.importorskip("torchft.reconfigure_test")._resize_worker
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.spawn(worker, args=(store.port, "ftcomm"), nprocs=3)


def ddp_with_a_loss(rank: int, folder: Path) -> None:
    """Rank 1 dies while the others are in the all-reduce of DDP; they reconfigure and go on with what they have."""
    os.environ["FTCOMM_LOG"] = "error"
    store = dist.FileStore(str(folder / "store"), 3)
    dist.init_process_group("ftcomm", store=store, rank=rank, world_size=3, enable_reconfigure=True)

    def meet(uuid: int, who: tuple[int, ...]) -> None:
        store.set(f"{uuid} {rank}", dist._get_reconfigure_handle())
        dist._reconfigure(uuid, [store.get(f"{uuid} {each}").decode() for each in who]).wait()

    def backward() -> float:
        ddp.zero_grad()
        ddp(torch.full((1, 100), float(dist.get_rank()))).sum().backward()
        return float(ddp.module.weight.grad.mean())

    meet(1, (0, 1, 2))
    ddp = DistributedDataParallel(torch.nn.Linear(100, 1))
    assert [backward(), backward()] == [1.0, 1.0]  # in the second one DDP tells all how it has cut its buckets
    if rank == 1:
        store.wait(["0 is in it", "2 is in it"])
        os.kill(os.getpid(), signal.SIGKILL)
    get_future = FtWork.get_future

    def begun(work: FtWork) -> Any:
        store.set(f"{rank} is in it", "")
        return get_future(work)

    FtWork.get_future = begun  # type: ignore[method-assign]
    with pytest.raises(LostError, match="rank 1"):
        backward()
    meet(2, (0, 2))
    assert backward() == 0.5
    (folder / f"{rank} has gone on").touch()
    dist.destroy_process_group()


@pytest.mark.skipif(not versions.RECONFIGURE, reason="torch has no dist._reconfigure before 2.14")
def test_survivors_of_a_loss_in_the_backward_of_ddp_reconfigure_and_go_on(tmp_path: Path) -> None:
    forks = multiprocessing.get_context("forkserver")  # that of tests.process.job, which has torch
    processes = [forks.Process(target=ddp_with_a_loss, args=(rank, tmp_path), daemon=True) for rank in range(3)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(DEADLINE)
    finally:
        for process in processes:
            process.kill()
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]
    assert all((tmp_path / f"{rank} has gone on").exists() for rank in (0, 2))


@pytest.mark.shows("own processes", "torchft Manager", "RE")
@pytest.mark.skipif(not versions.RECONFIGURE, reason="torch has no dist._reconfigure before 2.14")
def test_the_manager_of_torchft_drives_it_through_a_loss(groups: list[ReconfigurableGroup]) -> None:
    """Its lighthouse brings the handles round; a replica ends after a step of all three, and the others go on without
    it. Who is there first is torchft's affair."""
    pytest.importorskip("torchft")
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=500)
    last: list[int] = []  # the step that the others end with: said before the step of all three can be committed

    def train(group: ReconfigurableGroup) -> list[tuple[int, float]]:
        number = int(group.group_name.split()[1])
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        weights = torch.zeros(3)
        manager = Manager(
            pg=group,
            min_replica_size=2,
            state_dict=lambda: {"weights": weights.clone()},
            load_state_dict=lambda state: weights.copy_(state["weights"]),
            replica_id=f"replica_{number}_",
            store_addr="localhost",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse.address(),
            hostname="localhost",
            use_async_quorum=False,
            timeout=timedelta(seconds=SECONDS),
        )
        done = []
        while not last or manager.current_step() < last[-1]:
            manager.start_quorum()
            if number == 2 and manager.num_participants() == 3:
                last.append(manager.current_step() + 4)
            gradient = torch.full((3,), 2.0**number)
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                weights += gradient
                done.append((manager.num_participants(), float(gradient[0])))
                if number == 2 and manager.num_participants() == 3:
                    break
        manager.shutdown(wait=False)
        if number == 2:
            group.shutdown()
        return [*done, (0, float(weights[0]))]

    try:
        first, second, third = together(groups, train)
    finally:
        lighthouse.shutdown()
    averages = {2: [1.5, 2.5, 3.0], 3: [7 / 3]}
    assert third[-2] == (3, pytest.approx(7 / 3))
    assert all(any(value == pytest.approx(average) for average in averages[count]) for count, value in third[:-1])
    assert first[-2] == second[-2] == (2, 1.5)
    assert first[-1] == second[-1], "the weights differ"
