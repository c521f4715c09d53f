"""The core of messages: what the frames of a connection mean, and which message goes on, ends or fails by them. Pure:
events in, actions out, with no socket, clock or thread.

`ftcomm.p2p.progress` has the picture, and drives it. Each method is an event, and returns what is to be done, in that
order. A `ValueError` says that the other end of the connection has said what cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ftcomm.errors import CollectiveTimeout, LostError, MismatchError
from ftcomm.p2p.channels import MessageChannel, RecvChannel, SendChannel
from ftcomm.p2p.matching import MAX_BYTES, MAX_UNEXPECTED, Matching, Unexpected
from ftcomm.p2p.protocol import (
    ANSWER,
    EAGER,
    HEAD,
    MAGIC,
    MAX_MESSAGE,
    MessageRequest,
    ReceiverKind,
    RecvRequest,
    SenderKind,
    SendRequest,
    dtype_of,
    head,
)
from ftcomm.p2p.slots import AHEAD, Slots


class DialPeer(msgspec.Struct, frozen=True):
    """Connect this channel: then it is `opened`, or `hung_up`."""

    channel: SendChannel


class Write(msgspec.Struct, frozen=True):
    """Write the frame, and behind it the bytes of the message, which ends when they are out."""

    channel: MessageChannel
    frame: bytes
    message: SendRequest | None = None


class Read(msgspec.Struct, frozen=True):
    """The next bytes of the channel go into `memory`; when it is full they are `whole`."""

    channel: RecvChannel
    memory: memoryview


class Deliver(msgspec.Struct, frozen=True):
    """Give these bytes to the receive, which ends."""

    receive: RecvRequest
    data: bytes | bytearray


class EndMessage(msgspec.Struct, frozen=True):
    """The message ends: nothing of it is read or written any more."""

    message: MessageRequest
    error: BaseException | None = None


class HangUp(msgspec.Struct, frozen=True):
    """Close the channel, when nothing of it is read or written any more: then it is `hung_up`."""

    channel: MessageChannel
    why: str


class PutPiece(msgspec.Struct, frozen=True):
    """Copy `nbytes` of a message from `at` into a slot: then they are `put`."""

    channel: SendChannel
    message: SendRequest
    slot: int
    at: int
    nbytes: int


class TakePiece(msgspec.Struct, frozen=True):
    """Copy `nbytes` from a slot of the sender to `at` in a message: then they are `taken`."""

    channel: RecvChannel
    message: RecvRequest
    slot: int
    at: int
    nbytes: int


class FetchMessage(msgspec.Struct, frozen=True):
    """Copy a message to the host: then it is `fetched`."""

    channel: SendChannel
    message: SendRequest


MessageAction = DialPeer | Write | Read | Deliver | EndMessage | HangUp | PutPiece | TakePiece | FetchMessage
Actions = list[MessageAction]


class MessageCore:
    """All messages of one member. `name(peer)` is the name of another one in errors; `slots` are those of this rank and
    of others, of which the core asks only what they are like. Not thread-safe."""

    def __init__(self, owner: str, name: Callable[[int], str], slots: Slots | None = None) -> None:
        self.name, self.slots = name, slots
        self.error: BaseException | None = None  # every message fails with it from now on
        self.matching: Matching[RecvRequest] = Matching()
        self.senders: dict[int, SendChannel] = {}
        self.receivers: dict[int, RecvChannel] = {}
        self.pairs = [] if slots is None else list(range(0, slots.count, AHEAD))  # first slots of free pairs
        self._owner = owner
        self._lost: dict[int, str] = {}  # lost members, and why
        self._silent: dict[int, str] = {}  # members whose connection to this one has ended, and why

    # -- what the caller does ----------------------------------------------------------------------------------------

    def send(self, message: SendRequest) -> Actions:
        peer = message.target
        if (error := self._refusal(peer)) is not None:
            return [EndMessage(message, error)]
        channel = self.senders.get(peer)
        if channel is None:
            channel = self.senders[peer] = SendChannel(peer)
            channel.held.append(message)
            return [DialPeer(channel)]
        channel.held.append(message)
        return self._pump(channel)

    def receive(self, message: RecvRequest) -> Actions:
        if self.error is not None:
            return [EndMessage(message, self.error)]
        arrival = self.matching.want(message)
        return [] if arrival is None else self._match(arrival, message)

    def give_up(self, message: MessageRequest) -> Actions:
        """The deadline of a message has passed that has not ended."""
        actions: Actions = []
        if isinstance(message, RecvRequest):
            sent = "anybody" if message.source is None else self.name(message.source)
            text = f"nothing came from {sent} with tag {message.tag}. Did it send?"
            if not self.matching.cancel(message):  # its bytes are coming
                assert message.found is not None
                receiver = self.receivers.get(message.found)
                if receiver is not None:  # otherwise the connection is over, and the message has ended
                    actions.append(HangUp(receiver, "it has stopped in the middle of a message"))
                text = f"{self.name(message.found)} has stopped in the middle of a message with tag {message.tag}."
        else:
            assert isinstance(message, SendRequest)
            text = f"{self.name(message.target)} has not received the message with tag {message.tag}. Did it try to?"
            sender = self.senders.get(message.target)
            if sender is None:  # the connection is over, and has ended the message
                return []
            if message in sender.held:
                sender.held.remove(message)
            elif sender.offers.pop(message.number, None) is not None:
                actions.append(Write(sender, head(SenderKind.CANCEL, message)))
            else:  # it is being sent
                return [HangUp(sender, "it has stopped reading")]
        error = CollectiveTimeout(f"{self._owner}: {text} A longer timeout waits longer")
        return [*actions, EndMessage(message, error)]

    # -- connections -------------------------------------------------------------------------------------------------

    def opened(self, channel: SendChannel) -> Actions:
        """The channel is connected."""
        channel.is_open = True
        return self._pump(channel)

    def serves(self, channel: MessageChannel) -> bool:
        """Whether the channel is the one of its peer, and nothing has ended."""
        mine = self.senders if isinstance(channel, SendChannel) else self.receivers
        return self.error is None and mine.get(channel.peer) is channel

    def accepted(self, channel: RecvChannel) -> Actions:
        """A peer has connected. The connection replaces an earlier one."""
        peer = channel.peer
        earlier, self.receivers[peer] = self.receivers.get(peer), channel
        for arrival in self.matching.arrivals(peer):  # from an earlier life
            self.matching.discard(arrival)
        self.found(peer)
        return [] if earlier is None else [HangUp(earlier, "it has connected again")]

    def lose(self, peer: int, why: str) -> Actions:
        """A peer is gone: messages to and from it fail, until it connects again or is `found`."""
        self._lost[peer] = self._silent[peer] = why
        # At once: later messages must not go into a connection that is over.
        over = (self.senders.pop(peer, None), self.receivers.pop(peer, None))
        self._discard_offers(peer)
        return [HangUp(channel, why) for channel in over if channel is not None]

    def found(self, peer: int) -> None:
        """A peer may be sent to again."""
        self._lost.pop(peer, None)
        self._silent.pop(peer, None)

    def hung_up(self, channel: MessageChannel, why: str, unsent: Iterable[SendRequest] = ()) -> Actions:
        """The connection is over, and with it what was under way on it: `unsent` were still to be written."""
        failed: list[MessageRequest] = [*unsent, *channel.clear()]
        if isinstance(channel, SendChannel):
            if self.senders.get(channel.peer) is channel:
                del self.senders[channel.peer]
            if channel.track.pair is not None:
                self.pairs.append(channel.track.pair)
                channel.track.pair = None
        elif self.receivers.get(channel.peer) is channel:
            del self.receivers[channel.peer]
            self._silent[channel.peer] = why
            self._discard_offers(channel.peer)
        error = self.error or self._lost_error(channel.peer, why)
        return [*(EndMessage(message, error) for message in failed), *self.fail_silent()]

    def fail_silent(self) -> Actions:
        """Receives fail that no member is left to serve."""
        actions: Actions = []
        for receive in self.matching.wants() if self._silent else ():
            if receive.source in self._silent:
                self.matching.cancel(receive)
                actions.append(EndMessage(receive, self._lost_error(receive.source, self._silent[receive.source])))
        return actions

    # -- what the receiver says --------------------------------------------------------------------------------------

    def answered(self, channel: SendChannel, frame: bytes | bytearray) -> Actions:
        magic, kind, number = ANSWER.unpack(frame)
        if magic != MAGIC or kind not in tuple(ReceiverKind):
            raise ValueError(f"an answer that cannot be: magic {magic:#x}, kind {kind}")
        if kind == ReceiverKind.FREE:
            return self._freed(channel, number)
        actions: Actions = []
        channel.nbytes -= channel.unasked.pop(number, 0)
        message = channel.offers.pop(number, None)  # None: complete, or withdrawn
        if message is not None and kind != ReceiverKind.NACK:
            actions += self._go(channel, message, plain=kind == ReceiverKind.PLAIN)
        elif message is not None:
            error = MismatchError(
                f"{self._owner}: {self.name(channel.peer)} receives another number of elements, or another dtype, than "
                f"the {message.nbytes} bytes of {message.dtype} that were sent with tag {message.tag}"
            )
            actions.append(EndMessage(message, error))
        return actions + self._pump(channel)

    # -- what the sender says ----------------------------------------------------------------------------------------

    def heard(self, channel: RecvChannel, frame: bytes | bytearray) -> Actions:
        """A head has come."""
        magic, kind, number, tag, nbytes, name = HEAD.unpack(frame)
        if magic != MAGIC or nbytes > MAX_MESSAGE:
            raise ValueError(f"a frame that cannot be: magic {magic:#x}, {nbytes} bytes")
        if kind == SenderKind.DATA:
            receive = channel.reading = channel.expected.pop(number, None)
            if receive is None or receive.nbytes != nbytes or receive.started:
                raise ValueError(f"{nbytes} bytes of a message {number} that was not asked for")
            receive.land()
            return [Read(channel, receive.memory)]
        if kind == SenderKind.EAGER:
            if nbytes > EAGER or self.matching.full(channel.peer, nbytes):
                raise ValueError(f"{nbytes} bytes more that were not asked for, at most {MAX_BYTES} are kept")
            data = bytearray(nbytes)
            channel.reading = Unexpected(channel.peer, number, tag, dtype_of(name), nbytes, data)
            return [Read(channel, memoryview(data))]
        if kind in (SenderKind.RTS, SenderKind.SLOTS):
            if self.matching.full(channel.peer, 0):
                raise ValueError(f"an offer more, at most {MAX_UNEXPECTED} are kept")
            by_slots = kind == SenderKind.SLOTS
            return self._arrived(channel, Unexpected(channel.peer, number, tag, dtype_of(name), nbytes, None, by_slots))
        if kind == SenderKind.READY:
            return self._ready(channel, number, tag, nbytes)
        if kind == SenderKind.DONE:
            return self._done(channel, number)
        if kind == SenderKind.CANCEL:
            return self._withdrawn(channel, number)
        raise ValueError(f"a frame of the unknown kind {kind}")

    def whole(self, channel: RecvChannel) -> Actions:
        """The bytes behind the last head have come."""
        come, channel.reading = channel.reading, None
        if isinstance(come, RecvRequest):
            return [EndMessage(come)]
        assert come is not None
        return self._arrived(channel, come)

    def _arrived(self, channel: RecvChannel, arrival: Unexpected) -> Actions:
        if self.receivers.get(channel.peer) is not channel:
            return []
        receive = self.matching.arrive(arrival)
        return [] if receive is None else self._match(arrival, receive)

    def _match(self, arrival: Unexpected, receive: RecvRequest) -> Actions:
        """Give an arrival to its receive."""
        actions: Actions = []
        channel = self.receivers.get(arrival.source)
        fits = (arrival.nbytes, arrival.dtype) == (receive.nbytes, receive.dtype)
        answer = ReceiverKind.CTS if fits else ReceiverKind.NACK
        if fits and arrival.data is None:
            assert channel is not None  # when a connection ends, its offers are discarded
            receive.by_slots = arrival.slots and self.slots is not None and self.slots.reaches(channel.nonce)
            if arrival.slots and not receive.by_slots:
                answer = ReceiverKind.PLAIN
            channel.expected[arrival.number] = receive
            receive.found = arrival.source
            receive.number = arrival.number
        if channel is not None:
            actions.append(Write(channel, ANSWER.pack(MAGIC, answer, arrival.number)))
        if not fits:
            error = MismatchError(
                f"{self._owner}: {self.name(arrival.source)} has sent {arrival.nbytes} bytes of {arrival.dtype} with "
                f"tag {arrival.tag}, and this rank receives {receive.nbytes} bytes of {receive.dtype}. Send and "
                "receive the same number of elements of the same dtype"
            )
            actions.append(EndMessage(receive, error))
        elif arrival.data is not None:
            receive.found = arrival.source
            actions.append(Deliver(receive, arrival.data))
        return actions

    def _withdrawn(self, channel: RecvChannel, number: int) -> Actions:
        asked = channel.expected.get(number)
        if asked is not None and asked.started:
            raise ValueError(f"a message {number} is withdrawn of which {asked.started} bytes have come")
        arrival = self.matching.offered(channel.peer, number)
        if arrival is not None:
            self.matching.discard(arrival)
        receive = channel.expected.pop(number, None)
        if receive is None:
            return []
        receive.found = None
        again = self.matching.again(receive)
        return [] if again is None else self._match(again, receive)

    # -- by slots, see `ftcomm.p2p.slots` ------------------------------------------------------------------------------

    def put(self, piece: PutPiece) -> Actions:
        """A piece lies in its slot."""
        channel, message = piece.channel, piece.message
        if self.senders.get(channel.peer) is not channel:
            return []
        channel.track.ready()
        return [Write(channel, HEAD.pack(MAGIC, SenderKind.READY, message.number, piece.slot, piece.nbytes, b""))]

    def taken(self, piece: TakePiece) -> Actions:
        """A piece lies in its place."""
        channel, message = piece.channel, piece.message
        if self.receivers.get(channel.peer) is not channel:
            return []
        message.copied += piece.nbytes
        return [Write(channel, ANSWER.pack(MAGIC, ReceiverKind.FREE, message.number))]

    def fetched(self, fetch: FetchMessage, memory: memoryview) -> Actions:
        """A message lies in memory of the host."""
        channel, message = fetch.channel, fetch.message
        if message not in channel.fetching:  # the connection is over
            return []
        channel.fetching.remove(message)
        message.memory = memory
        return [Write(channel, head(SenderKind.DATA, message), message)]

    def _go(self, channel: SendChannel, message: SendRequest, *, plain: bool) -> Actions:
        """Send a message that the receiver wants."""
        track = channel.track
        if track.pair is None and message.place is not None and not plain and self.pairs:
            track.pair = self.pairs.pop()
        if message.place is None:
            return [Write(channel, head(SenderKind.DATA, message), message)]
        if plain or track.pair is None:
            channel.fetching.append(message)
            return [FetchMessage(channel, message)]
        track.sends.append(message)
        return self._fill(channel)

    def _fill(self, channel: SendChannel) -> Actions:
        """Copy into free slots."""
        assert self.slots is not None
        actions: Actions = []
        while (piece := channel.track.next(self.slots.chunk)) is not None:
            actions.append(PutPiece(channel, *piece))
        return actions

    def _freed(self, channel: SendChannel, number: int) -> Actions:
        """The receiver has taken a piece."""
        whole = channel.track.freed(number, self.slots.chunk if self.slots is not None else 0)
        done = [] if whole is None else [Write(channel, head(SenderKind.DONE, whole), whole)]
        return [*done, *self._fill(channel)]

    def _ready(self, channel: RecvChannel, number: int, slot: int, nbytes: int) -> Actions:
        """The sender has put a piece into a slot."""
        slots, receive = self.slots, channel.expected.get(number)
        if receive is None or slots is None or not receive.by_slots:
            raise ValueError(f"a piece of a message {number} that was not asked for")
        at = receive.started
        if not 0 <= slot < slots.count or not 0 < nbytes == min(slots.chunk, receive.nbytes - at):
            raise ValueError(f"a piece of {nbytes} bytes in slot {slot} behind {at} of {receive.nbytes} bytes")
        receive.started += nbytes
        return [TakePiece(channel, receive, slot, at, nbytes)]

    def _done(self, channel: RecvChannel, number: int) -> Actions:
        """The sender has ended a message that has come by slots: what was copied counts."""
        receive = channel.expected.get(number)
        if receive is None or not receive.by_slots or receive.copied != receive.nbytes:
            raise ValueError(f"the end of a message {number} that has not come whole")
        del channel.expected[number]
        return [EndMessage(receive)]

    # -- with many -----------------------------------------------------------------------------------------------------

    def _pump(self, channel: SendChannel) -> Actions:
        """Send what may be sent of the messages held back."""
        actions: Actions = []
        while channel.is_open and channel.held and len(channel.offers) + len(channel.unasked) < MAX_UNEXPECTED:
            message = channel.held.popleft()
            message.number = next(channel.numbers)
            if message.nbytes <= EAGER and channel.nbytes + message.nbytes <= MAX_BYTES:
                channel.unasked[message.number] = message.nbytes
                channel.nbytes += message.nbytes
                actions.append(Write(channel, head(SenderKind.EAGER, message), message))
            else:
                channel.offers[message.number] = message
                kind = SenderKind.RTS if message.place is None else SenderKind.SLOTS
                actions.append(Write(channel, head(kind, message)))
        return actions

    def _refusal(self, peer: int) -> BaseException | None:
        if self.error is None and peer in self._lost:
            return self._lost_error(peer, self._lost[peer])
        return self.error

    def _lost_error(self, peer: int, why: str) -> LostError:
        return LostError(f"{self._owner}: {self.name(peer)} was lost: {why}")

    def _discard_offers(self, peer: int) -> None:
        for arrival in self.matching.arrivals(peer):
            if arrival.data is None:
                self.matching.discard(arrival)
