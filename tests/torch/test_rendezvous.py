"""How ranks that torchrun has started find their job: again and again, and without a secret in torch's store."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.rendezvous import _env_rendezvous_handler

from ftcomm.control.timeouts import Timeouts
from ftcomm.errors import InitError, SettingsError
from ftcomm.launch.coordinator import sidecar
from ftcomm.settings.launchers import NUMBERINGS
from ftcomm.torch import rendezvous, secret
from ftcomm.torch.create import _beneath, _warn_if_short, create
from tests.integrations.torchrun import torchrun

ENDPOINT = "127.0.0.1:4000"

Meet = Callable[[int], str]  # rank -> the token that it joins with


@pytest.fixture
def store() -> dist.HashStore:
    made = dist.HashStore()
    made.set_timeout(timedelta(seconds=1))
    return made


@pytest.fixture
def meet(store: dist.HashStore, monkeypatch: pytest.MonkeyPatch) -> Meet:
    """Both ranks are this process; what they would do when they know the token is to read it."""
    monkeypatch.setattr(sidecar, "start", lambda *what: ENDPOINT)
    for name in ("FTCOMM_TOKEN", "FTCOMM_JOB", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    other: list[str] = []
    jobs: list[str] = []

    def join(there: Any, keys: str, endpoint: str, token: str, rank: int, *rest: Any) -> Any:
        assert endpoint == ENDPOINT
        if rank == 0:  # until then its token can be read
            monkeypatch.setattr(rendezvous, "_met", rendezvous._met - 1)
            rendezvous.join_by_store(there, 1, 2, timedelta(seconds=1))
        other.append(token)
        jobs.append(rest[-1]["job"])

    monkeypatch.setattr(rendezvous, "_join", join)
    monkeypatch.setattr(rendezvous, "_ours", None)

    def both(times: int) -> str:
        other.clear()
        rendezvous.join_by_store(store, 0, 2, timedelta(seconds=1))
        one, two = other
        assert one == two
        assert jobs[-1] == jobs[-2] != "", "they would refuse each other, or take another job for their own"
        return one

    return both


def said(store: dist.HashStore) -> dict[str, str]:
    return {key: store.get(key).decode() for key in store.list_keys()}


def test_no_secret_goes_through_torchs_store(meet: Meet, store: dist.HashStore) -> None:
    token = meet(1)
    assert len(token) == 32
    [(key, value)] = said(store).items()
    assert key.endswith("/coordinator")
    assert value.startswith(f"{ENDPOINT} {os.getpid()}/")
    assert token not in value
    with pytest.raises(InitError, match=r"another host.*Set FTCOMM_TOKEN"):  # all have joined
        secret.read(value.split()[1])


@pytest.mark.parametrize("job", [True, False], ids=["ftcomm run", "torchrun"])
def test_a_timeout_that_is_too_short_is_refused_before_anybody_joins(
    store: dist.HashStore, monkeypatch: pytest.MonkeyPatch, job: bool
) -> None:
    """Else the first rank to raise it would be missed by one that is still about to join, which says so instead."""
    monkeypatch.setattr(rendezvous, "in_job", lambda: job)
    monkeypatch.setattr(rendezvous, "joined", lambda: pytest.fail("it has joined"))
    monkeypatch.setattr(rendezvous, "join_by_store", lambda *what: pytest.fail("it has joined"))
    options = SimpleNamespace(
        timeout=timedelta(seconds=1), group_id="0", global_ranks_in_group=[], group_rank=0, group_size=3, store=store
    )
    with pytest.raises(SettingsError, match=r"timeout=1 s of a process group whose job takes 5 s to give up"):
        create(options, None)


def test_a_timeout_within_which_no_stall_is_removed_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    settings = SimpleNamespace(timeouts=Timeouts.derive(120.0))
    group = SimpleNamespace(shard=0, shards=1, roster=(0, 1), settings=settings, internals=None)
    _warn_if_short.cache_clear()
    for seconds in (600.0, 60.0, 60.0, group.settings.timeouts.give_up):
        _beneath(group, [], None, "torch 0", seconds)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("timeout=60 s of a process group, whose job may take 132 s to remove a replica that stands")
    assert "(FTCOMM_OP_TIMEOUT=120)" in said


def test_the_token_of_the_environment_is_used(
    meet: Meet, store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTCOMM_TOKEN", "of the user")
    assert meet(1) == "of the user"
    assert [value.rpartition(" ")[0] for value in said(store).values()] == [f"{ENDPOINT} FTCOMM_TOKEN"]


@pytest.mark.parametrize("mine", ["", "mine"])
def test_a_token_on_some_ranks_only(
    store: dist.HashStore, meet: Meet, monkeypatch: pytest.MonkeyPatch, mine: str
) -> None:
    """Also what somebody else may have written there: whose token it is, rank 1 decides by its own environment."""
    monkeypatch.setenv("FTCOMM_TOKEN", mine)
    store.set(
        f"ftcomm/0/{rendezvous._met}/coordinator", f"{ENDPOINT} {'1/3/' + 16 * 'a' if mine else 'FTCOMM_TOKEN'} job"
    )
    with pytest.raises(
        InitError, match="is set here, and not on rank 0" if mine else "is not set here, but it is on rank 0"
    ):
        rendezvous.join_by_store(store, 1, 2, timedelta(seconds=1))


def test_who_meets_again_meets_at_another_key(
    meet: Meet, store: dist.HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [meet(1), meet(2)]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    tokens.append(meet(3))
    assert len({*tokens}) == len(said(store)) == 3


def test_what_lies_at_a_place_must_be_ours(tmp_path: Path) -> None:
    ours = secret.Secret()
    assert secret.read(ours.place) == ours.token
    pid, fd, nonce = ours.place.split("/")
    file = (tmp_path / "file").open("w+")
    wrong = {
        "../../etc/passwd": "that is no place",
        f"{pid}/{fd}/{'0' * 16}": "there is none",
        f"{pid}/{file.fileno()}/{nonce}": "there is none",
        f"{2**22 + 1}/{fd}/{nonce}": "there is none",  # no process has that number
    }
    for place, why in wrong.items():
        with pytest.raises(InitError, match=f"{why}.*Set FTCOMM_TOKEN"):
            secret.read(place)
    os.fchmod(int(fd), 0o444)
    with pytest.raises(InitError, match="belongs to somebody else"):
        secret.read(ours.place)
    ours.close()
    ours.close()
    file.close()


def test_torchs_own_rendezvous_hears_the_numbers_of_another_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun with MASTER_ADDR and MASTER_PORT, say: torch looks for RANK and WORLD_SIZE alone."""
    asked: list[str] = []

    def torchs(url: str, **options: Any) -> Any:
        asked.append(url)
        yield dist.HashStore(), 1, 4

    for name in ("FTCOMM_COORDINATOR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    next(iter(rendezvous.env_rendezvous("env://", torchs, {})))
    next(iter(rendezvous.env_rendezvous("env://?rank=2&world_size=3", torchs, {})))
    monkeypatch.setenv("RANK", "0")
    next(iter(rendezvous.env_rendezvous("env://", torchs, {})))
    assert asked == ["env://?rank=1&world_size=4", "env://?rank=2&world_size=3", "env://"]


def test_without_a_launcher_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FTCOMM_COORDINATOR", *(each for numbering in NUMBERINGS for each in numbering[1:])):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"RANK expected, but not set\. A launcher sets it: `ftcomm run --replicas 4"):
        next(iter(rendezvous.env_rendezvous("env://", _env_rendezvous_handler, {})))


THRICE = """
import datetime, torch, torch.distributed as dist
for i in range(3):
    dist.init_process_group("ftcomm", timeout=datetime.timedelta(seconds=60))
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    assert x.tolist() == [3.0] * 3
    dist.destroy_process_group()
print("all three")
"""


@pytest.mark.parametrize("token", ["", pytest.param("of the user", marks=pytest.mark.sweep)])
def test_one_torchrun_meets_three_times(tmp_path: Path, token: str) -> None:
    (tmp_path / "script.py").write_text(THRICE)
    given = {"FTCOMM_TOKEN": token} if token else {}
    code, said = torchrun(tmp_path, "--nproc-per-node", "2", str(tmp_path / "script.py"), **given)
    assert (code, said.count("all three")) == (0, 2), said[-3000:]


AGAIN = """
import os, signal, torch, torch.distributed as dist
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("ftcomm")
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == 2
if attempt == 0 and dist.get_rank() == 0:  # who has started the coordinator
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 0:
    signal.pause()  # until torchrun ends it
dist.destroy_process_group()
print(f"done in attempt {attempt}")  # one string: two ranks share this file, and it may be unbuffered
"""


@pytest.mark.protocol
def test_torchrun_starts_all_again_and_each_attempt_meets_by_itself(tmp_path: Path) -> None:
    """Its store lives on, with the address of the coordinator of the attempt before."""
    (tmp_path / "script.py").write_text(AGAIN)
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    code, said = torchrun(tmp_path, *options, str(tmp_path / "script.py"))
    assert (code, said.count("done in attempt 1")) == (0, 2), said[-3000:]
