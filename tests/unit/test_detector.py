from __future__ import annotations

from ftcomm.control.detector import Detector


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
