"""Messages in frames, whole or in pieces, and what is no message."""

from __future__ import annotations

import socket

import msgspec
import pytest

from ftcomm.control.framing import Framing, receive_while

pytestmark = pytest.mark.protocol


class Word(msgspec.Struct, frozen=True, tag=True):
    text: str


class Number(msgspec.Struct, frozen=True, tag=True):
    value: int


FRAMES: Framing[Word | Number] = Framing(Word | Number, 100)
SAID = [Word("a"), Number(7), Word("b" * 80)]


def test_what_comes_byte_by_byte_is_cut_into_the_messages_that_were_said() -> None:
    received, heard = bytearray(), []
    for byte in b"".join(map(FRAMES.frame, SAID)):
        received.append(byte)
        message = FRAMES.cut(received)
        heard += [] if message is None else [message]
    assert heard == SAID
    assert not received


def test_what_comes_by_a_connection_is_read_until_it_ends() -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b"".join(map(FRAMES.frame, SAID)) + FRAMES.frame(SAID[0])[:-1])
        far.shutdown(socket.SHUT_WR)
        assert [FRAMES.read(lambda most: near.recv(min(most, 3))) for _ in SAID] == SAID
        with pytest.raises(ConnectionError, match="was closed"):
            FRAMES.read(near.recv)


def test_nobody_waits_for_what_is_not_wanted_any_more() -> None:
    near, far = socket.socketpair()
    looks = iter([True, True, True, False])
    with near, far:
        far.sendall(FRAMES.frame(SAID[0])[:-1])
        with pytest.raises(TimeoutError):
            FRAMES.read(receive_while(near, lambda: next(looks), 0.01))


@pytest.mark.parametrize("bad", [b"\0\0\0\x65" + bytes(101), b"\xff" * 4, b"\0\0\0\x01\xc1", FRAMES.frame(SAID[2])])
def test_what_is_no_message_or_too_long_is_refused(bad: bytes) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(bad)
        with pytest.raises(msgspec.DecodeError):
            FRAMES.read(near.recv, 50)
    if bad != FRAMES.frame(SAID[2]):
        with pytest.raises(msgspec.DecodeError):
            FRAMES.cut(bytearray(bad))
