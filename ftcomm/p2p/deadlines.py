"""The deadlines of messages, in seconds in which this process has run."""

from __future__ import annotations

import heapq
import itertools
import time

from ftcomm.control.running_time import RunningTime
from ftcomm.p2p.protocol import MessageRequest

MANY = 1024  # deadlines, beyond which those of ended messages are removed


class MessageDeadlines:
    """A heap of the deadlines of messages that have not ended. Not thread-safe."""

    def __init__(self) -> None:
        self.ran = RunningTime()
        self.heap: list[tuple[float, int, MessageRequest]] = []  # (deadline in seconds of `ran`, order, message)
        self._many = MANY
        self._order = itertools.count()

    def add(self, message: MessageRequest) -> None:
        now = time.monotonic()
        heapq.heappush(self.heap, (self.ran.at(now) + message.deadline - now, next(self._order), message))
        if len(self.heap) > self._many:  # most of those messages ended long before
            self.heap = [entry for entry in self.heap if not entry[2].ended.is_set()]
            heapq.heapify(self.heap)
            self._many = max(MANY, 2 * len(self.heap))

    def passed(self) -> MessageRequest | None:
        """Take out and return a message that has not ended, and whose deadline has passed."""
        ran = self.ran.at(time.monotonic())
        while self.heap and (self.heap[0][0] <= ran or self.heap[0][2].ended.is_set()):
            message = heapq.heappop(self.heap)[2]
            if not message.ended.is_set():
                return message
        return None

    def left(self) -> float | None:
        """Returns the seconds until the next deadline; None without one."""
        return self.heap[0][0] - self.ran.at(time.monotonic()) if self.heap else None

    def clear(self) -> list[MessageRequest]:
        """Take out and return all messages that have not ended."""
        heap, self.heap = self.heap, []
        return [message for _, _, message in heap if not message.ended.is_set()]
