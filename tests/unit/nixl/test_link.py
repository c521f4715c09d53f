"""Two endpoints of NIXL in one process: real agents, real puts, and what each side makes of trouble."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.nixl import frames
from ftcomm.transport.nixl.mirror import NixlMirror
from ftcomm.transport.nixl.writer import NixlMirrorWriter
from ftcomm.transport.segment import (
    CHUNK,
    DETAIL,
    FINGERPRINT,
    POSTED,
    REDUCED,
    SLOTS,
    STAGED,
    TAKEN,
    descriptor,
)
from tests.unit.nixl.rig import BEGUN, EPOCH, Link, until, until_all_have_ended, wait

pytest.importorskip("nixl_cu12._api", reason="NIXL is not installed: pip install 'ftcomm[rdma]'")


def test_frames_fill_the_mirror(link: Link, pair: tuple[NixlMirrorWriter, NixlMirror]) -> None:
    reader, peer = pair
    assert [peer.words[word] for word in peer.published] == [BEGUN] * len(peer.published)
    rng = np.random.default_rng(7)
    large, odd, small = (rng.bytes(nbytes) for nbytes in (CHUNK, 200_001, 100))
    reader.send(POSTED, BEGUN | 1, 0, link.staged(POSTED, 0, 0, large), (41, 99, 7))
    callers = np.frombuffer(odd, np.uint8).copy()
    reader.send(POSTED, BEGUN | 2, CHUNK + 64, memoryview(callers), (42, 99, 7))
    reader.send(REDUCED, BEGUN | 1, 128, link.staged(REDUCED, 0, 128, small), (41, 99, 7))
    reader.send(TAKEN, BEGUN | 1, 0, memoryview(b""), (1 << 63, 0, 0))
    until(reader.flush, "no room")
    wait(peer, TAKEN, 1)  # the last that was sent
    assert (peer.words[POSTED], peer.words[REDUCED]) == (BEGUN | 2, BEGUN | 1)
    at = descriptor(1)
    assert [peer.words[at + word] for word in (0, 1, DETAIL)] == [42, 99, 7]
    assert peer.words[descriptor(0) + FINGERPRINT] == 1 << 63
    assert peer.carve(POSTED, 0, 0, CHUNK, np.dtype(np.uint8)).tobytes() == large
    assert peer.carve(POSTED, 1, 64, len(odd), np.dtype(np.uint8)).tobytes() == odd
    assert peer.carve(REDUCED, 0, 128, 100, np.dtype(np.uint8)).tobytes() == small
    assert not link.lost


def test_never_more_than_all_slots_under_way(link: Link, pair: tuple[NixlMirrorWriter, NixlMirror]) -> None:
    """Nobody takes anything in: what does not fit is left, and goes when there is room."""
    reader, peer = pair
    remote = reader._remote
    total = 3 * SLOTS
    payload = memoryview(np.zeros(STAGED // SLOTS, np.uint8))
    for count in range(1, total + 1):
        reader.send(POSTED, BEGUN | count, (count - 1) % SLOTS * len(payload), payload, (count, 0, 0))
        assert sum(window.bytes for window in remote.windows) <= STAGED
    until(reader.flush, "no room")
    until(lambda: reader.told(POSTED, BEGUN | total), "puts that do not end")
    wait(peer, POSTED, total)
    until_all_have_ended(link, reader)


def test_what_could_not_be_put_is_never_announced(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when what was put before it ends, in the moment before the connection is closed."""
    reader, _ = pair
    endpoint, remote = link.writer.endpoint(), reader._remote
    cut_off = next(each for each in endpoint.library.errors if each.__name__ == "nixlRemoteDisconnectError")
    state = ["PROC"]
    told: list[bytes] = []
    monkeypatch.setattr(endpoint, "tell", lambda remote, message: told.append(message))
    for agent in endpoint._agents:
        monkeypatch.setattr(agent, "transfer", lambda handle: "PROC")
        monkeypatch.setattr(agent, "check_xfer_state", lambda handle: state[0])
    reader.send(POSTED, BEGUN | 1, 0, memoryview(np.zeros(2 * CHUNK, np.uint8)), (1, 0, 0))

    def fail(handle: Any) -> str:
        raise cut_off

    for agent in endpoint._agents:
        monkeypatch.setattr(agent, "transfer", fail)
    with pytest.raises(ConnectionError):
        reader.send(POSTED, BEGUN | 2, 0, memoryview(np.zeros(2 * CHUNK, np.uint8)), (2, 0, 0))
    state[0] = "DONE"
    until(lambda: bool(told), "nobody looks")
    with endpoint.lock:
        assert [frame.value for message in told for frame in frames.unpack(message)] == [BEGUN | 1]
    reader.close()
    with endpoint.lock:
        endpoint._forget(remote)


def test_the_mirror_stays_over_epochs(link: Link, pair: tuple[NixlMirrorWriter, NixlMirror]) -> None:
    """What comes late of the epoch before raises no word of the next one."""
    reader, peer = pair
    later, next_peer = link.connect(EPOCH + 1)
    assert next_peer.mirror is peer.mirror
    assert later._remote is reader._remote
    reader.send(POSTED, BEGUN | 1, 0, memoryview(np.zeros(CHUNK, np.uint8)), (1, 0, 0))
    reader.flush()
    wait(peer, POSTED, 1)
    assert next_peer.words[POSTED] == (EPOCH + 1) << COUNTER
    later.send(POSTED, (EPOCH + 1) << COUNTER | 1, 0, memoryview(b"new"), (1, 0, 0))
    later.flush()
    until(lambda: next_peer.words[POSTED] == (EPOCH + 1) << COUNTER | 1, "no word")
    assert next_peer.carve(POSTED, 0, 0, 3, np.dtype(np.uint8)).tobytes() == b"new"
    later.close()
    next_peer.close()


def test_what_is_under_way_when_the_epoch_ends_is_not_announced(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fence: its source is used again, so it may bring anything. The next epoch waits for its end."""
    reader, peer = pair
    later, next_peer = link.connect(EPOCH + 1)
    endpoint = link.writer.endpoint()
    state, looked, put = "PROC", 0, 0

    def look(handle: Any) -> str:
        nonlocal looked
        looked += 1
        return state

    def post(handle: Any) -> str:
        nonlocal put
        put += 1
        return state

    for agent in endpoint._agents:
        monkeypatch.setattr(agent, "transfer", post)
        monkeypatch.setattr(agent, "check_xfer_state", look)
    reader.send(POSTED, BEGUN | 1, 0, memoryview(np.zeros(CHUNK, np.uint8)), (1, 0, 0))
    reader.send(TAKEN, BEGUN | 1, 0, memoryview(b""), (0, 0, 0))
    assert reader.flush()
    assert put == len(endpoint._agents)
    assert not reader.told(POSTED, BEGUN | 1)
    assert not reader.told(TAKEN, BEGUN | 1), "it would be heard before what it follows"
    until(lambda: looked > 0, "nobody looks")
    reader.close()
    put = 0
    later.send(POSTED, (EPOCH + 1) << COUNTER | 1, 0, memoryview(b"small enough to go without a put"), (1, 0, 0))
    assert not later.flush()
    assert not later.told(POSTED, (EPOCH + 1) << COUNTER | 1), (
        "it was sent while a put of the epoch before was under way"
    )
    state = "DONE"
    until(later.flush, "it has ended")
    until(lambda: next_peer.words[POSTED] == (EPOCH + 1) << COUNTER | 1, "no word")
    assert not put
    assert [peer.words[word] for word in (POSTED, TAKEN)] == [BEGUN, BEGUN], "of the epoch that is over"
    later.close()
    next_peer.close()


@pytest.mark.parametrize("long_ago", [False, True])
def test_a_put_that_fails_is_told_and_its_mirror_is_left(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch, long_ago: bool
) -> None:
    reader, peer = pair
    endpoint = link.writer.endpoint()
    error = next(each for each in endpoint.library.errors if each.__name__ == "nixlRemoteDisconnectError")

    def fails(handle: Any) -> str:
        raise error("gone")

    for each in endpoint._agents:
        monkeypatch.setattr(each, "transfer", lambda handle: "PROC")
        monkeypatch.setattr(each, "check_xfer_state", fails)
    reader.send(POSTED, BEGUN | 1, 0, memoryview(np.zeros(CHUNK, np.uint8)), (1, 0, 0))
    reader.flush()
    until(lambda: bool(link.heard), "nobody is told")
    assert link.heard[0][:2] == (1, EPOCH)
    assert "nixlRemoteDisconnectError" in link.heard[0][2]
    reader.send(POSTED, BEGUN | 2, 0, memoryview(b"more"), (2, 0, 0))
    with pytest.raises(ConnectionError, match="nixlRemoteDisconnectError"):
        reader.flush()
    monkeypatch.undo()
    reader.close()
    if long_ago:
        with endpoint.lock:
            endpoint._look_around(time.monotonic() + 60)
        assert not endpoint._remotes
    again, fresh = link.connect(EPOCH + 1)
    assert fresh.mirror is not peer.mirror, "a put of which nobody knows may still write there"
    again.send(POSTED, (EPOCH + 1) << COUNTER | 1, 0, memoryview(np.zeros(CHUNK, np.uint8)), (1, 0, 0))
    again.flush()
    until(lambda: fresh.words[POSTED] == (EPOCH + 1) << COUNTER | 1, "no word")
    again.close()
    fresh.close()


def test_a_put_that_never_ends_has_a_deadline(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, _ = pair
    endpoint = link.writer.endpoint()
    for each in endpoint._agents:
        monkeypatch.setattr(each, "transfer", lambda handle: "PROC")
        monkeypatch.setattr(each, "check_xfer_state", lambda handle: "PROC")
    monkeypatch.setattr(endpoint.puts, "timeout", 0.01)
    reader.send(POSTED, BEGUN | 1, 0, memoryview(np.zeros(CHUNK, np.uint8)), (1, 0, 0))
    reader.flush()
    until(lambda: bool(link.heard), "nobody is told")
    assert "is at PROC after" in link.heard[0][2]


@pytest.mark.parametrize(
    "wrong", [dict(value=(EPOCH + 1) << COUNTER | 1), dict(number=frames.EARLY + 1), dict(word=TAKEN)]
)
def test_a_wrong_frame_changes_nothing_and_ends_the_connection(
    link: Link, pair: tuple[NixlMirrorWriter, NixlMirror], wrong: dict[str, int]
) -> None:
    reader, peer = pair
    before = peer.words.tobytes()
    shown = frames.Frame(POSTED, peer.channel, 1, 0, 4, 1, BEGUN | 1, (1, 1, 1), b"evil")._replace(**wrong)
    with link.writer.endpoint().lock:
        link.writer.endpoint().tell(reader._remote, frames.pack(*shown))
    until(lambda: bool(link.lost), "nobody is told")
    assert link.lost[0][:2] == (0, EPOCH)
    assert peer.words.tobytes() == before


def test_a_connection_that_ends_is_told_once_and_not_when_quiet(link: Link) -> None:
    link.lost = []
    reader, peer = link.connect()
    other, quiet = link.connect(EPOCH + 1)
    quiet.quiet()
    other.close()
    reader.close()
    until(lambda: bool(link.lost), "nobody is told")
    assert link.lost == [(0, EPOCH, "connection for data: closed by the other side")]
    peer.close()
    quiet.close()
    assert len(link.lost) == 1
