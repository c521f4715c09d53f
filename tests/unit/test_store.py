"""The file of views: what is in it after a crash, and who may open it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftcomm.control.store import StoreError, ViewStore
from ftcomm.control.views import Address, Member, View


def view(epoch: int) -> View:
    return View(epoch, None, (Member(0, "a", (Address("h", 1, "b", 2, 3, "0" * 32),), True),), "why")


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
