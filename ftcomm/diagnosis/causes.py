"""The causes of a job that stands still: the kinds of verdicts, what each means, and what a person can do about it."""

from __future__ import annotations

import enum


class StallCause(enum.Enum):
    """The kinds of verdicts. `value` is the name in JSON."""

    NONE = "none"  # there is no stall
    NEVER_JOINED = "never joined"
    OWN_CODE = "own code"
    OTHER_GROUP = "other group"  # ranks wait for each other in different groups
    DEADLOCK = "deadlock"  # ranks wait for each other, one of them for a message
    DATA_LOADER = "data loader"
    COMPILATION = "compilation"
    FROZEN = "frozen process"
    ENDED = "ended process"
    DEAD_HOST = "dead host"
    CUT = "cut network"
    CUT_ONE_WAY = "cut network, one way"
    SLOW_NETWORK = "slow network"
    MISMATCH = "mismatch of calls"
    SWAPPED = "swapped order of ops"
    GARBAGE = "garbage collector"
    STARVED = "no CPU"
    FULL_DISK = "full disk"
    INSIDE = "inside ftcomm"
    PAUSE = "pause"  # fewer replicas contribute than the step loop wants
    UNKNOWN = "unknown"


_DO = {
    StallCause.NONE: "",
    StallCause.NEVER_JOINED: "Look at its output (ftcomm run --log-dir): does it come to ftcomm.init()? The job begins "
    "when all replicas have.",
    StallCause.OWN_CODE: "Look at that line: a lock, a queue, input that does not come, or a loop without an end.",
    StallCause.OTHER_GROUP: "Let all ranks call the collectives of these groups in the same order, or from threads of "
    "their own.",
    StallCause.DEADLOCK: "Let one of them send before it receives, with the tag that the other receives, or start one "
    "of these calls with async_op=True and wait for it behind the other.",
    StallCause.DATA_LOADER: "Its input is slow or stands still: look at its workers and its storage; more workers or "
    "prefetching help against the first.",
    StallCause.COMPILATION: "It compiles and will go on. Compile before the first step, share the compiler's cache, or "
    "raise --op-timeout above what that takes.",
    StallCause.FROZEN: "Let it go on with kill -CONT, or let the debugger go; else it is removed, and started again.",
    StallCause.ENDED: "It is started again by its launcher; ftcomm status shows when.",
    StallCause.DEAD_HOST: "Look at that host: is it up? The job goes on without its replicas; take it out of service "
    "if it fails again.",
    StallCause.CUT: "Look at the network between these hosts: cable, switch port, firewall. ftcomm doctor probes it.",
    StallCause.CUT_ONE_WAY: "Packets pass in one direction only: look at firewalls, routes and the ARP tables between "
    "these hosts. ftcomm doctor probes it.",
    StallCause.SLOW_NETWORK: "The bytes move, but slowly: look at errors of that link (ip -s link, ethtool -S), at its "
    "speed, and at who else uses it. ftcomm doctor measures it.",
    StallCause.MISMATCH: "Let all ranks make the same calls with the same shapes and dtypes; look at what differs "
    "between these lines.",
    StallCause.SWAPPED: "Let all ranks make these two calls in the same order.",
    StallCause.GARBAGE: "It frees memory by Python's garbage collector: call gc.freeze() after the model is built, "
    "gc.disable() in the loop and gc.collect() every so many steps on all ranks alike.",
    StallCause.STARVED: "Something else has its CPU: look with top at that host, or at the limits of its container.",
    StallCause.FULL_DISK: "Free some room on that file system, or write elsewhere.",
    StallCause.INSIDE: "That is ours to look at: keep the output of ftcomm why --json and file an issue.",
    StallCause.PAUSE: "It goes on by itself as soon as enough replicas contribute; ftcomm status shows where the "
    "others are. StepLoop(min_replicas=...) says how many it takes.",
    StallCause.UNKNOWN: "Look at the stacks: ftcomm why --stacks.",
}


def remedy(cause: StallCause) -> str:
    """Returns what a person can do."""
    return _DO[cause]
