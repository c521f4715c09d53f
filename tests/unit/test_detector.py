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
