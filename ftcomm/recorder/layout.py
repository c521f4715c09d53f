"""The bytes of a recording: a header, a table of groups, a ring of records, and texts. All numbers are little-endian.

A record has 128 bytes, 16 words of 8. Three kinds share the words, and so one reader:

    word    op                                   wait for a replica          phase
    0       place: stamp and number of the op    place of its op, or phase   its number in the process, from 1
    1       kind, route, group; epoch            kind, 0, group; epoch       kind, phase, 0; epoch
    2       call, see `kernels.call_codes`       replica; rank in it + 1     step
    3       detail, see `kernels.call_codes`     seconds, so far             a number
    4       caller, a text                       -                           note and caller, texts
    5       time of the first post               -                           time at which its wait gives up
    6       time at which all had posted         -                           -
    7       time of the return                   -                           time of the end
    8       epoch in which it goes on, or 0      -                           -
    9       views that were entered meanwhile    -                           -
    10      1: it has failed                     -                           1: it has failed
    11      algorithm, a text; 0: the fast path  -                           -
    15      time of the call                     when the wait began          time of the beginning

A wait of a phase is in the group `PHASES`. Its rank + 1 is 0 if that is the rank with the same index as
this one, or, in a static group, the member that `replica` numbers.

Times are seconds of CLOCK_MONOTONIC, which all processes of a host share; 0.0 is not yet, or not taken.

The first store of a record zeroes all of it and then fills it from word 0 to word 15. All later stores are of one
aligned word. So a record whose last word is 0 is torn: its writer is in the midst of it, or died there. A reader looks
twice, since the writer goes on meanwhile: what it takes has the same first three words and the same last one in both
looks. For a record that is overwritten changes word 0 or word 1 before any other, and word 15 last.

A text is 2 bytes of length and so many of UTF-8. Its number is its offset in the texts; 0 is the empty text. Texts are
only added, behind `TEXTS_USED`.
"""

from __future__ import annotations

import dataclasses
import enum
import struct

MAGIC = b"FTCOMMFR"
VERSION = 1
ALL = "*"  # the name of the group of all replicas

HEADER = 4096
# magic, version, bytes of a record, records, bytes of a group, groups, bytes of texts, the three offsets
SHAPE = struct.Struct("<8sIIIIIIQQQ")
TEXTS_USED, GROUPS_USED = 64, 72  # offsets of words that grow
# pid, its start in clock ticks after the boot, replica, rank in it, replicas, ranks of a replica, monotonic and wall
# clock when the recording began
PROCESS = struct.Struct("<QQIIIIdd")
PROCESS_AT = 80
ENDED, ENDED_AT = 128, 136  # words: an `RecordingEnd`, and its time
LAG = 144  # word, signed: boundaries passed beyond the training steps, as of now
NAMES_AT = 256  # boot, host, job: a byte of length and 255 of UTF-8 each
NAMES = 3
ROUTES_AT, ROUTES = 2048, 256  # numbers of texts, 4 bytes each: the transports of a route

GROUP = 64
# name and members (texts), what kind it is, this rank in it, when it began and was closed
GROUP_FORMAT = struct.Struct("<IIIIdd")

RECORD = 128
WORDS = RECORD // 8
CALLED = struct.Struct("<QQQQI84xd")  # an op: place, head, call, detail, caller, time
WAITED = struct.Struct("<QQIId88xd")  # place, head, replica, rank in it + 1, seconds, time
BEGUN = struct.Struct("<QQqqII80xd")  # a phase: number, head, step, a number, note, caller, time
# To read them, with the head as kind, route or phase, group and epoch, and what is stored later.
READ_OP = struct.Struct("<QBBHIQQI4xdddQQQQ24xd")
READ_WAIT = struct.Struct("<QBBHIIId88xd")
READ_PHASE = struct.Struct("<QBBHIqqIId8xd16xQ32xd")
SECONDS = NUMBER = 3
GIVES_UP = 5  # of a phase
POSTED, ARRIVED, RETURNED, LAST_EPOCH, RETRIES, FAILED, ALGORITHM = 5, 6, 7, 8, 9, 10, 11

OP, WAIT, PHASE = 1, 2, 3  # kinds of records
MANY = 0xFFFF  # the group of ops whose group found no room in the table
PHASES = 0xFFFE  # the group of waits of phases

MOST_TEXT = 1000  # bytes of a text


class PhaseKind(enum.IntEnum):
    """The things that a rank does besides ops. The numbers are in files; none is ever reused."""

    JOIN = 1  # from the registration to the first view
    STEP = 2  # an attempt at a training step, from the boundary to its outcome
    BOUNDARY = 3
    VOTE = 4
    PAUSE = 5  # too few replicas. The number says how many contribute as it begins, the note how many are needed
    VIEW = 6  # a change of view: from the stop to the entry. The number is the new epoch
    SNAPSHOT = 7  # the state is copied for a joiner
    FETCH = 8  # a joiner waits for the state
    LOAD = 9  # a joiner loads it
    REPLAY = 10  # a joiner applies updates that it has kept. The number says how many
    LINGER = 11  # at the end, for joiners that fetch from here
    MEET = 12  # waits for the other ranks of its replica: for what follows from what all know
    STAND = 13  # waits at a boundary where membership changes. The number is that of the boundary
    SEND = 14  # waits until a message was received. The number is its tag, the note the group
    RECV = 15  # waits for a message; likewise


class RecordingEnd(enum.IntEnum):
    """The way in which the recording of a process has ended, as it says itself."""

    NONE = 0  # it runs, or died
    CLOSED = 1
    FAILED = 2


class GroupKind(enum.IntEnum):
    """The kinds of groups, as files have them."""

    JOB = 1
    SUBGROUP = 2
    STATIC = 3


@dataclasses.dataclass(frozen=True)
class Shape:
    """The number of each that there is room for."""

    groups: int
    records: int
    texts: int  # bytes

    @property
    def ring(self) -> int:
        """The offset of the first record."""
        return HEADER + GROUP * self.groups

    @property
    def text(self) -> int:
        """The offset of the first text."""
        return self.ring + RECORD * self.records

    @property
    def size(self) -> int:
        return self.text + self.texts


PROCESS_SHAPE = Shape(1024, 16384, (3 << 20) - HEADER - GROUP * 1024 - RECORD * 16384)  # 3 MiB in all
SMALL_SHAPE = Shape(2, 16, 1024)  # of a recording that is never read
MOST_BYTES = 4 << 20  # of a file, that a reader reads
