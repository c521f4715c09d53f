"""Decides why a replica was interrupted, from what is known of its end. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence

import msgspec

from ftcomm.control.blame import Removal
from ftcomm.control.script_end import ScriptEnd


class Kind(enum.Enum):
    """The causes that are told apart."""

    PROGRAM = "program"  # an exit code of its own, after an error of its script
    SIGNAL = "signal"  # a signal of unknown origin
    OUT_OF_MEMORY = "out of memory"  # killed by the kernel for want of host memory
    GPU = "gpu"  # an error of the CUDA runtime or the driver
    HOST_LOST = "host lost"  # its host fell silent
    NETWORK = "network"  # it and others could not reach each other, though they live
    STALL = "stall"  # it held the others up for longer than was allowed
    DIVERGENCE = "divergence"  # its results differed from those of the others
    OPERATOR = "operator"  # `ftcomm restart`, or a drain
    PREEMPTION = "preemption"  # SIGTERM by somebody else: a scheduler, or a person
    UNKNOWN = "unknown"


class Evidence(msgspec.Struct, frozen=True):
    """The known facts of the end of a replica's life. Empty fields are not known.

    `code` is an exit code, `signal` the name of the signal that killed it. `script` is how a script of it has ended, as
    its rank or another launcher has said, `reason` what the coordinator says, `removal` its kind of removal
    (`ftcomm.control.blame.Removal`). `lines` are the last of its output.
    """

    code: int | None = None
    signal: str = ""
    script: ScriptEnd | None = None
    reason: str = ""
    removal: str = ""
    lines: tuple[str, ...] = ()
    killed_by_kernel: bool = False  # for want of memory
    restart_asked: bool = False  # by `ftcomm restart`
    left: bool = False  # at a step boundary, in order
    diverged: bool = False


class InterruptionCause(msgspec.Struct, frozen=True):
    """The cause in words; `component` and `category` are those of table 5 of the Llama 3 report (arXiv 2407.21783)."""

    kind: Kind
    detail: str  # one line
    component: str
    category: str
    planned: bool = False


# Each class of CUDA errors with the component that it speaks of. The first that matches counts, so the hardware stands
# before what follows from it. The numbers are those of NVIDIA's XID catalogue.
_GPU = (
    (r"uncorrectable (?:ECC|NVLink) error|XID[^\d]{0,12}(?:48|63|64|94|95)\b", "ECC error", "GPU memory"),
    (r"XID[^\d]{0,12}(?:79)\b|fallen off the bus|device(?:s)? (?:is|are) lost", "lost GPU", "Faulty GPU"),
    (r"XID[^\d]{0,12}(?:61|62|119|120)\b|GSP (?:RPC )?timeout", "firmware", "GPU system processor"),
    (r"XID[^\d]{0,12}74\b|NVLink error", "NVLink", "Faulty GPU"),
    (r"NVML.*(?:thermal|overheat)|HW Thermal Slowdown", "thermal", "GPU thermal interface and sensor"),
    (r"CUDA out of memory|torch\.OutOfMemoryError|cudaErrorMemoryAllocation", "out of GPU memory", "Software bug"),
    (r"illegal memory access|cudaErrorIllegalAddress", "illegal memory access", "Software bug"),
    (r"device-side assert", "device-side assert", "Software bug"),
    (r"misaligned address", "misaligned address", "Software bug"),
    (r"unspecified launch failure|cudaErrorLaunchFailure", "launch failure", "Faulty GPU"),
    (r"CUDA error: ([^\n]{1,80})|CUDA driver error: ([^\n]{1,80})", "", "Faulty GPU"),
)
_GPU_PATTERNS = tuple((re.compile(pattern, re.IGNORECASE), name, part) for pattern, name, part in _GPU)
_ERROR = re.compile(r"^(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b.*")
_DETAIL = 200  # characters


def gpu_error(text: str) -> tuple[str, str] | None:
    """Returns the class of the CUDA error that `text` speaks of and the component, or None."""
    for pattern, name, component in _GPU_PATTERNS:
        if found := pattern.search(text):
            return name or next(part for part in found.groups() if part).strip(), component
    return None


def last_error(lines: Sequence[str]) -> str:
    """Returns the last line that names an exception; without one, the last line that is not empty, or ""."""
    said = [line.strip() for line in lines if line.strip()]
    return next((line for line in reversed(said) if _ERROR.match(line)), said[-1] if said else "")[:_DETAIL]


def classify(evidence: Evidence) -> InterruptionCause:
    """Decide the cause. What was asked for comes first, then what others saw, then what the process itself said."""
    text = "\n".join((*evidence.lines, evidence.reason))
    if evidence.restart_asked:
        return InterruptionCause(Kind.OPERATOR, "restarted by `ftcomm restart`", "Restart", "Planned", planned=True)
    if evidence.diverged:
        return InterruptionCause(
            Kind.DIVERGENCE, "its results differed from the others'", "Silent data corruption", "GPU"
        )
    if evidence.removal:
        return _removed(evidence)
    if evidence.killed_by_kernel:
        return InterruptionCause(Kind.OUT_OF_MEMORY, "killed by the kernel: out of memory", "System memory", "Host")
    if error := gpu_error(text):
        name, component = error
        category = "Dependency" if component == "Software bug" else "GPU"
        return InterruptionCause(Kind.GPU, f"CUDA: {name}", component, category)
    terminated = evidence.signal == "SIGTERM"
    if evidence.script is not None and terminated and not evidence.left:  # by the launcher: with it the job has failed
        return InterruptionCause(Kind.PROGRAM, _with(str(evidence.script), evidence), "Software bug", "Dependency")
    if evidence.left or terminated:
        return InterruptionCause(Kind.PREEMPTION, "SIGTERM from outside", "Host maintenance", "Unplanned maintenance")
    return _ended(evidence)


def _removed(evidence: Evidence) -> InterruptionCause:
    detail = evidence.reason[:_DETAIL]
    if evidence.removal == Removal.STALL.value:
        return InterruptionCause(Kind.STALL, detail or "others waited for it", "Watchdog timeout", "Unknown")
    if evidence.removal == Removal.UNREACHABLE.value:
        return InterruptionCause(Kind.NETWORK, detail or "could not be reached", "Network switch or cable", "Network")
    return InterruptionCause(Kind.HOST_LOST, detail or "was not heard", "Host lost", "Host")


def _with(how: str, evidence: Evidence) -> str:
    """Returns how a script has ended, with the last error in its output."""
    error = last_error(evidence.lines)
    return f"{how}{error and f': {error}'}"[:_DETAIL]


def _ended(evidence: Evidence) -> InterruptionCause:
    if evidence.code is not None and evidence.code != 0:
        detail = _with(f"exit code {evidence.code}", evidence)
        return InterruptionCause(Kind.PROGRAM, detail, "Software bug", "Dependency")
    if evidence.code == 0:
        return InterruptionCause(Kind.PROGRAM, "exit code 0 in mid-training", "Software bug", "Dependency")
    if evidence.signal:
        return _signalled(evidence.signal)
    if evidence.script is not None:
        return InterruptionCause(Kind.PROGRAM, str(evidence.script), "Software bug", "Dependency")
    return InterruptionCause(Kind.UNKNOWN, evidence.reason[:_DETAIL] or "its process ended", "Unknown", "Unknown")


def _signalled(name: str) -> InterruptionCause:
    if name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"):
        return InterruptionCause(Kind.SIGNAL, f"crashed with {name}", "Software bug", "Dependency")
    return InterruptionCause(Kind.SIGNAL, f"killed by {name}", "Killed from outside", "Unknown")


def lost_connection(reason: str) -> InterruptionCause:
    """Returns the cause of a view that only makes connections again: no replica was lost."""
    return InterruptionCause(Kind.NETWORK, reason[:_DETAIL], "Network switch or cable", "Network")
