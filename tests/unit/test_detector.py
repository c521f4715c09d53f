from __future__ import annotations

import random
import sys
from collections import Counter

from ftcomm.control.detector import Detector
from tests.bytecodes import counting


def test_silence_longer_than_the_timeout_is_suspected() -> None:
    detector: Detector[str] = Detector(5.0)
    detector.heard("a", 0.0)
    detector.heard("b", 0.0)
    for now in (1.0, 2.0, 3.0, 4.0, 5.0):
        detector.heard("b", now)
        assert detector.silent(now) == {}
    assert detector.silent(5.5) == {"a": 5.5}


def test_an_observer_that_did_not_run_suspects_nobody() -> None:
    detector: Detector[str] = Detector(5.0)
    detector.heard("a", 0.0)
    detector.silent(0.5)
    assert detector.silent(60.0) == {}, "it was the observer that was stopped"
    assert detector.silent(62.0) == {}
    assert detector.silent(64.0) == {}
    assert list(detector.silent(65.5)) == ["a"]


def test_an_observer_that_did_not_run_has_heard_nobody() -> None:
    detector: Detector[str] = Detector(5.0)
    detector.heard("a", 0.0)
    detector.heard("b", 0.0)
    detector.silent(0.5)
    detector.silent(60.0)
    detector.heard("b", 60.0)
    assert not detector.within("a", 2.0, 60.0)
    assert detector.within("b", 2.0, 60.0)


def test_forgotten_peers_are_not_suspected() -> None:
    detector: Detector[str] = Detector(5.0)
    detector.heard("a", 0.0)
    detector.forget("a")
    assert detector.silent(1.0) == {}
    assert detector.silent(3.0) == {}
    assert detector.silent(5.5) == {}


def test_who_acknowledges_and_does_not_speak_is_mute_and_not_silent() -> None:
    detector: Detector[str] = Detector(5.0)
    for peer in ("held", "gone", "well"):
        detector.heard(peer, 0.0)
    for second in range(1, 61):
        detector.heard("well", second)
        detector.acknowledged("held", second)
        detector.acknowledged("well", second)
        silent = detector.silent(second)
        assert silent == ({"gone": second} if second > 5 else {})
        assert detector.mute(second) == ({"held": second} if second > 5 else {})
    assert not detector.within("held", 2.0, 60.0), "an acknowledgement is no message of the process"
    detector.heard("held", 60.5)
    assert detector.mute(60.5) == {}


def test_who_acknowledges_no_more_is_silent_a_timeout_later() -> None:
    detector: Detector[str] = Detector(5.0)
    detector.heard("a", 0.0)
    for second in range(1, 31):
        detector.acknowledged("a", min(second, 20))
        assert detector.silent(second) == ({"a": second - 20} if second > 25 else {})
    assert detector.mute(30.0) == {}


def test_an_acknowledgement_that_is_told_late_counts_from_when_it_was() -> None:
    detector: Detector[str] = Detector(5.0)
    detector.heard("a", 0.0)
    detector.acknowledged("a", 4.0)
    detector.acknowledged("a", 3.0)
    for second in range(1, 9):
        assert detector.silent(second) == {}
    assert detector.silent(9.5) == {"a": 5.5}


def test_an_acknowledgement_of_who_was_forgotten_makes_no_peer() -> None:
    detector: Detector[str] = Detector(5.0)
    detector.heard("a", 0.0)
    detector.forget("a")
    detector.acknowledged("a", 1.0)
    assert detector.silent(2.0) == detector.silent(4.0) == detector.silent(6.5) == {}


def test_an_observer_that_did_not_run_calls_nobody_mute() -> None:
    detector: Detector[str] = Detector(5.0)
    detector.heard("a", 0.0)
    detector.silent(0.5)
    detector.silent(60.0)
    detector.acknowledged("a", 60.0)
    assert detector.mute(60.0) == {}
    detector.silent(62.0)
    detector.silent(64.0)
    detector.acknowledged("a", 65.5)
    assert detector.mute(65.5) == {"a": 65.5}


def test_a_tick_in_which_nobody_can_be_silent_looks_at_nobody() -> None:
    def bytecodes(peers: int) -> int:
        detector: Detector[int] = Detector(5.0)
        for peer in range(peers):
            detector.heard(peer, 0.0)
        assert detector.silent(1.0) == detector.mute(1.0) == {}
        seen: Counter[str] = Counter()
        sys.settrace(counting(seen))
        detector.silent(2.0)
        detector.mute(2.0)
        sys.settrace(None)
        return seen.total()

    assert bytecodes(10) == bytecodes(1000)


def test_what_a_tick_leaves_out_changes_no_verdict() -> None:
    """In any history: beside a detector that ticks all the time, one that looks at all peers in each tick."""
    for seed in range(200):
        draw = random.Random(seed)
        detector: Detector[int] = Detector(5.0)
        plain: Detector[int] = Detector(5.0)
        now = 0.0
        for step in range(120):
            now += draw.choice((0.0, 0.3, 1.0, 2.4, 9.0 if draw.random() < 0.1 else 0.5))
            peer = draw.randrange(5)
            event = draw.choice(("heard", "heard", "acknowledged", "forget", "tick", "tick", "tick"))
            if event == "tick":
                plain._oldest_sign = plain._oldest_heard = float("-inf")
                found = detector.silent(now), detector.mute(now)
                assert found == (plain.silent(now), plain.mute(now)), f"seed {seed}, step {step}"
            else:
                args = {"heard": (peer, now), "acknowledged": (peer, now - draw.random()), "forget": (peer,)}[event]
                for each in (detector, plain):
                    getattr(each, event)(*args)
