"""The words through which the host and the all-reduce kernel speak, and those through which members do.

All are 64-bit and aligned. `ctl` lies in pinned host memory, `state` and `view` on the device; without a GPU all lie in
host memory. Who writes what:

    ctl     OPEN        host     the epoch in which programs may run, 0 while none may; who sees it change, ends
            RETURNED    kernel   ops returned, so the number of the op that runs; by the host at a view change and the end
            STARTED     kernel   1 + number of the op that a program entered last
            TEMPLATE    kernel   the `template` of that launch, by which the host knows its arguments
            STATUS      kernel   how that op stands
            MISMATCHED  kernel   1 + number of the last op whose members had made different calls
            SEEN        kernel   what they had called then: (NUMBER, CALL) of each member
    state   NUMBER      kernel   as RETURNED, for the next kernel to read at home
            BASE        kernel   tasks of the epoch before the op that runs
            LANES_DONE  kernel   lanes of it that are stable
            ENTERED     kernel   programs that have begun, ever
            ENDED       kernel   and ended; nothing of ours touches any memory while they are equal and OPEN is 0
    view    (all)       host     the members, while no program may run
"""

from __future__ import annotations

# In the segment of each member, for all to read: a line for each lane.
LANES_AT = 512
LINE = 8
POSTED, REDUCED, TAKEN, NUMBER_OF, CALL_OF = 0, 1, 2, 3, 4

# ctl
OPEN, RETURNED, STARTED, TEMPLATE, STATUS, MISMATCHED = 0, 1, 2, 3, 4, 5
SEEN = 16
CTL_WORDS = 64

RUNNING, OK, ABORTED, TIMED_OUT, MISMATCH = 0, 1, 2, 3, 4  # STATUS

# state
NUMBER, BASE, LANES_DONE, ENTERED, ENDED = 0, 1, 2, 3, 4
STATE_WORDS = 8

# view
EPOCH, MEMBERS, ME, SOURCES, CONTRIBUTES, SOLE, ONE_HOST = 0, 1, 2, 3, 4, 5, 6
WORDS_OF, STAGING_OF, SOURCE_INDEX = 16, 32, 48
VIEW_WORDS = 64
MOST_MEMBERS = 16

SLOTS = 4
AHEAD = SLOTS // 2  # tasks posted and not taken; see ftcomm/collective/stream.py
