"""Looks whether the kernel has killed a process for want of memory, and takes secrets out of what ranks write.

The kernel says so in its log (/dev/kmsg), which names the process and which root may read, and in the counters of the
control group, which name no process: if only one process ended by SIGKILL since the last look, it was that one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

_KILLED = re.compile(r"[Kk]illed process (\d+)\b")
_KMSG = "/dev/kmsg"
_LEAST = 6  # characters of a secret that is looked for; shorter ones are words of any text


def killed_in(log: str) -> frozenset[int]:
    """Returns the pids that a kernel log names as killed for want of memory."""
    lines = (line for line in log.splitlines() if "memory" in line.lower() or "oom" in line.lower())
    return frozenset(int(pid) for line in lines for pid in _KILLED.findall(line))


def kills_counted(events: str) -> int:
    """Returns `oom_kill` of a control group's memory.events or memory.oom_control, 0 if it has none."""
    found = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
    return int(found.group(1)) if found else 0


class KernelKills:
    """Finds what the kernel has killed for want of memory since this was made. Not thread-safe; no call blocks."""

    def __init__(self, counter: Path | None = None, kmsg: str = _KMSG) -> None:
        """`counter`: the file in which a control group counts its kills; without it that of this process's group."""
        self._counter = own_counter() if counter is None else counter
        self._counted = self._count()
        self._log = -1
        with contextlib.suppress(OSError):
            self._log = os.open(kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def killed(self, pid: int) -> bool:
        """Whether the kernel has killed `pid`, which has just ended by SIGKILL."""
        counted, self._counted = self._counted, self._count()
        return pid in killed_in(self._read_log()) or self._counted > counted

    def close(self) -> None:
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _count(self) -> int:
        try:
            return kills_counted(self._counter.read_text())
        except OSError:
            return 0

    def _read_log(self) -> str:
        """Returns what is new in the kernel's log, a record a read."""
        records: list[str] = []
        while self._log >= 0 and len(records) < 1000:
            try:
                record = os.read(self._log, 8192)
            except BlockingIOError:
                break
            except OSError:  # records were overwritten before they were read, or this kernel has no log
                break
            if not record:
                break
            records.append(record.decode(errors="replace"))
        return "".join(records)


def own_counter() -> Path:
    """Returns where the control group of this process, version 2 or 1, counts whom the kernel has killed."""
    root, found = Path("/sys/fs/cgroup"), Path()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                return root / "memory" / path.strip("/") / "memory.oom_control"
            if not controllers:
                found = root / path.strip("/") / "memory.events"
    return found


def without(text: str, secrets: Iterable[str]) -> str:
    """Returns `text` with `***` in place of each secret."""
    for secret in secrets:
        if len(secret) >= _LEAST:
            text = text.replace(secret, "***")
    return text
