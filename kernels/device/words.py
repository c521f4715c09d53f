"""The words through which the host and the kernels of whole ops speak, and those through which members do.

All are 64-bit and aligned. `ctl` lies in pinned host memory, `state` and `view` on the device; without a GPU all lie in
host memory. What is polled lies where it is polled: `flags` on the device of their owner, with a copy for the hosts in
its segment. Each word has one writer at a time:

    ctl     OPEN        host     the epoch in which programs may run; 0: none may, CLOSED: never again
            RETURNED    kernel   ops returned, so the number of the one that runs; host: at a view change
            CALLED      kernel   1 + `template` of the last op that returned of those that the host has called; ops of a
                                 graph have CAPTURED or more, and are counted by RETURNED alone
            STARTED     kernel   1 + number of the op that was begun last
            TEMPLATE    kernel   the `template` of that launch, by which the host knows its arguments; before STARTED
            BASE_OF     kernel   tasks of the epoch before it; likewise
            STATUS      kernel   how it stands
            MISMATCHED  kernel   1 + number of the last op for which members had made different calls
            BEGUN       kernel   attempts at ops that have begun
            FINISHED    kernel   and ended; while both are equal and OPEN is 0, nothing of ours touches any memory
            SEEN        kernel   what the members had called: (NUMBER, CALL) of each
            SEEN_WHO    kernel   and WHO of each; written by collectives that are no all-reduce
            HEARD       host     the last MISMATCHED of which it has read SEEN; the op does not end before
            NEWS        host     the table of the members, before OPEN; while BEGUN and FINISHED are equal
    view    (all)       kernel   its copy of NEWS, from the first attempt in that epoch on
    state   NUMBER, ATTEMPTS, DIFFERED
                        kernel   as RETURNED, BEGUN and MISMATCHED, for kernels to read at home
            BASE        kernel   tasks of the epoch before the next op
            NOW, ...    kernel   what its programs tell each other, see `ftcomm.kernels.device.attempts`
    flags   POSTED, REDUCED, TAKEN
                        kernel   how far it has come in a lane, for the kernels of all members
            NUMBER_OF, CALL_OF, WHO_OF
                        kernel   which op that is, and which call; WHO of collectives that are no all-reduce
    copy    POSTED, REDUCED, TAKEN
                        kernel   the same for the hosts, behind the flags; host: raised to the epoch at a view change
"""

from __future__ import annotations

# A line for each lane, in the flags and in their copy, which begins at word LANES_AT of the segment.
LANES_AT = 512
LINE = 8
POSTED, REDUCED, TAKEN, NUMBER_OF, CALL_OF, WHO_OF = 0, 1, 2, 3, 4, 5

# ctl
OPEN, RETURNED, STARTED, TEMPLATE, BASE_OF, STATUS, MISMATCHED, BEGUN, FINISHED, HEARD = 0, 1, 2, 3, 4, 5, 6, 7, 8, 9
CALLED = 10
SEEN = 16
SEEN_WHO = 48
NEWS = 64
CTL_WORDS = 128

CLOSED = -1  # OPEN
CAPTURED = 1 << 40  # TEMPLATE

RUNNING, OK, ABORTED, TIMED_OUT, MISMATCH = 0, 1, 2, 3, 4  # STATUS

# state
NUMBER, BASE, NOW, INSIDE, NEXT, DONE, LEFT, ATTEMPTS, DIFFERED = 0, 1, 2, 3, 4, 5, 6, 7, 8
STATE_WORDS = 16

# NEWS, view. An op that was begun before the epoch has TODO_OF = 1 + its number, and NTODO tasks left at address TODO
EPOCH, MEMBERS, ME, SOURCES, CONTRIBUTES, SOLE, ONE_HOST = 0, 1, 2, 3, 4, 5, 6
RESUMED = 7  # the number of the first op in it
TODO_OF, TODO, NTODO = 8, 9, 10
COPY = 11  # address of the copy of this member's flags
PRESENT = 12  # the members, as bits: that of replica r is 1 << r
FLAGS_OF, STAGING_OF, SOURCE_STAGING = 16, 32, 48
VIEW_WORDS = 64
MOST_MEMBERS = 16

# A task: chunk | (index of the holder + 1, or 0 to reduce) << HOLDER | SKIP if this member has the chunk already. Of
# other collectives than the all-reduce a chunk is a row, which is given by those who give it at first if it has no
# holder; and EMPTY is set if nothing is moved any more, as data are lost that members need.
HOLDER = 32
SKIP = 48
EMPTY = 49

# Which collective that is: CALL has its kind, an index in call_codes.KINDS, from bit KIND on, and WHO the replicas that
# have a rank, as bits like PRESENT, and from bit ROOT on the rank of the root + 1, or 0.
KIND = 58
ROOT = 48
MOST_REPLICAS = ROOT  # they are numbered from 0

SLOTS = 4
AHEAD = SLOTS // 2  # tasks posted and not taken; see ftcomm/collective/stream.py
