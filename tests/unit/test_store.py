"""The file of views: what is in it after a crash, and who may open it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ftcomm.control.finishes import NO_FINISHES, Finishes
from ftcomm.control.store import StoreError, ViewStore
from ftcomm.control.views import Address, Addresses, Member, View


def view(epoch: int) -> View:
    return View(epoch, None, (Member(0, "a", Addresses.of((Address("h", 1, "b", 2, 3, "0" * 32),)), True),), "why")


def reopened(path: Path) -> ViewStore:
    store = ViewStore(path)
    store.open()
    return store


def test_the_last_two_views_come_back(tmp_path: Path) -> None:
    store = reopened(tmp_path / "views")
    for epoch in (1, 2, 3):
        store.append(view(epoch))
    store.close()
    assert reopened(tmp_path / "views").views == [view(2), view(3)]


def test_a_view_is_on_the_disk_before_anybody_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fdatasync
    synced = []

    def fdatasync(fd: int) -> None:
        sync(fd)
        synced.append(os.fstat(fd))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    store = reopened(tmp_path / "views")
    for epoch in (1, 2, 3):
        store.append(view(epoch))
        there = (tmp_path / "views").stat()
        assert [(x.st_ino, x.st_size) for x in synced[-1:]] == [(there.st_ino, there.st_size)]
    assert len(synced) == 3
    store.close()


def test_who_has_finished_comes_back(tmp_path: Path) -> None:
    """A store of a version that wrote none has none; the end of the job removes it."""
    path = tmp_path / "views"
    store = reopened(path)
    store.append(view(1))
    assert store.finishes == NO_FINISHES
    for finishes in (Finishes(1, ((0, "a"),)), Finishes(2, ((0, "a"), (1, "b")))):
        store.write_finishes(finishes)
    store.close()
    store = reopened(path)
    assert store.finishes == finishes
    asyncio.run(store.clear())
    assert not list(tmp_path.iterdir())
    store.close()


def test_without_views_nobody_has_finished(tmp_path: Path) -> None:
    """Somebody has removed the file of views and not the one beside it: the next job there is another one."""
    path = tmp_path / "views"
    store = reopened(path)
    store.append(view(1))
    store.write_finishes(Finishes(1, ((0, "a"),), (0,)))
    store.close()
    path.unlink()
    store = reopened(path)
    assert store.finishes == NO_FINISHES
    store.append(view(1))
    store.close()
    store = reopened(path)
    assert store.finishes == NO_FINISHES
    store.close()


def test_who_has_finished_is_on_the_disk_as_it_was_or_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "views"
    before, after = Finishes(1, ((0, "a"),)), Finishes(2, ((0, "a"), (1, "b")))
    store = reopened(path)
    store.write_finishes(before)
    sync = os.fsync
    synced: list[tuple[int, int]] = []

    def fsync(fd: int) -> None:
        sync(fd)
        synced.append((os.fstat(fd).st_ino, (tmp_path / "views.finished").stat().st_ino))

    monkeypatch.setattr(os, "fsync", fsync)
    old = (tmp_path / "views.finished").stat().st_ino
    store.write_finishes(after)
    new = (tmp_path / "views.finished").stat().st_ino
    assert synced == [(new, old), (tmp_path.stat().st_ino, new)], "the file before it has its name, then the name"
    store.close()


@pytest.mark.parametrize("text", ["", "hello", '{"epoch":-1,"lives":[]}', '{"epoch":1,"lives":[["a",0]]}'])
def test_a_file_that_does_not_say_who_has_finished_is_refused(tmp_path: Path, text: str) -> None:
    store = reopened(tmp_path / "views")
    store.append(view(1))
    store.close()
    (tmp_path / "views.finished").write_text(text)
    with pytest.raises(StoreError, match=r"views\.finished does not say which replicas have finished .*--store"):
        reopened(tmp_path / "views")
    (tmp_path / "views.finished").unlink()
    reopened(tmp_path / "views").close()


def test_256_replicas_with_the_longest_names_that_have_finished_fit_into_any_store() -> None:
    finishes = Finishes(1, tuple((replica, "x" * 256) for replica in range(256)))
    assert len(msgspec.json.encode(finishes)) < 70_000


def test_a_torn_last_line_is_dropped_and_written_over(tmp_path: Path) -> None:
    path = tmp_path / "views"
    store = reopened(path)
    store.append(view(1))
    store.append(view(2))
    store.close()
    path.write_bytes(path.read_bytes()[:-5])
    store = reopened(path)
    assert store.views == [view(1)]
    store.append(view(2))
    store.close()
    assert reopened(path).views == [view(1), view(2)]


@pytest.mark.parametrize("what", ["write", "fdatasync"])
def test_a_view_that_did_not_fit_leaves_nothing_and_may_be_written_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = reopened(tmp_path / "views")
    store.append(view(1))

    def write(fd: int, data: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
        return write(fd, data[:5])

    def fdatasync(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, what, {"write": write, "fdatasync": fdatasync}[what])
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                store.append(view(2))
    assert store.views == [view(1)]
    store.append(view(2))
    store.append(view(3))
    store.close()
    assert (tmp_path / "views").read_bytes().count(b"\n") == 3
    assert reopened(tmp_path / "views").views == [view(2), view(3)]


@pytest.mark.parametrize("left", [0, 10])
def test_a_file_that_somebody_has_cut_is_written_anew(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As logrotate's copytruncate does. Its next reader finds the last two views."""
    path = tmp_path / "views"
    store = reopened(path)
    store.append(view(1))
    store.append(view(2))
    os.truncate(path, left)

    def fdatasync(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(OSError, match="No space left"):
            store.append(view(3))
    store.append(view(3))
    store.close()
    assert reopened(path).views == [view(2), view(3)]


def test_a_second_coordinator_is_refused(tmp_path: Path) -> None:
    first = reopened(tmp_path / "views")
    with pytest.raises(StoreError, match="another coordinator"):
        reopened(tmp_path / "views")
    first.close()
    reopened(tmp_path / "views").close()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "views").write_text("hello\n")
    with pytest.raises(StoreError, match="--store"):
        reopened(tmp_path / "views")


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no/such"):
        reopened(tmp_path / "no" / "such" / "views")


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "views").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="it is a symbolic link; choose another --store"):
        reopened(tmp_path / "views")


def test_a_file_that_somebody_else_has_put_there_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reopened(tmp_path / "views").close()
    fstat, other = os.fstat, (tmp_path / "views").stat().st_ino

    class Found:
        def __init__(self, fd: int) -> None:
            self.real = fstat(fd)
            self.st_uid = self.real.st_uid + (self.real.st_ino == other)

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    monkeypatch.setattr(os, "fstat", Found)
    with pytest.raises(StoreError, match=f"not a file of this user, but of user {os.geteuid() + 1}"):
        reopened(tmp_path / "views")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # and the folder is its owner's
    reopened(tmp_path / "views").close()


def test_the_name_of_a_new_file_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    reopened(tmp_path / "views").close()
    assert synced == [tmp_path.stat().st_ino]


def test_a_job_keeps_its_name_until_it_is_over(tmp_path: Path) -> None:
    names = [ViewStore(tmp_path / "views").job() for _ in range(3)]
    assert len(set(names)) == 1
    assert ViewStore(tmp_path / "others").job() != names[0]
    asyncio.run(ViewStore(tmp_path / "views").clear())
    assert [path.name for path in tmp_path.iterdir()] == ["others.job"]
    assert ViewStore(tmp_path / "views").job() != names[0]
    (tmp_path / "views.job").write_text("")
    with pytest.raises(StoreError, match=r"views\.job holds no name of a job; remove it"):
        ViewStore(tmp_path / "views").job()
    with pytest.raises(StoreError, match=r"cannot keep the name of the job in .*: No such file.*export FTCOMM_JOB="):
        ViewStore(tmp_path / "none" / "views").job()
