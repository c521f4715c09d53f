"""Threads that were told to end: a close waits for them, but not for ever."""

from __future__ import annotations

import logging
import threading

import pytest

from ftcomm.process import joining


def test_who_has_ended_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    thread = threading.Thread(target=int)
    thread.start()
    assert joining.join(thread, "group 'g'")
    assert not caplog.records


def test_who_does_not_end_is_waited_for_no_longer_and_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "LIMIT", 0.01)
    goes_on = threading.Event()
    thread = threading.Thread(target=goes_on.wait, args=(30.0,), name="ftcomm-some", daemon=True)
    thread.start()
    with caplog.at_level(logging.WARNING, "ftcomm"):
        assert not joining.join(thread, "group 'g', rank 1")
    goes_on.set()
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("group 'g', rank 1: thread ftcomm-some was told to end, and has not within 0.01 s.")
