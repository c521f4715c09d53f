"""A process whose stacks are taken thousands of times while it does what is worst for that, and is not harmed.

    python -m tests.stacks --seconds 600           # prints how many stacks were taken, and how

Its threads recurse across the ends of the interpreter's stack chunks, make and drop code objects, raise, collect
garbage, and hold the interpreter lock in C. It counts what it has computed, and ends with 0 if all of that was right.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftcomm.diagnosis import processes, stacks
from ftcomm.process.stacks import SIGNAL, StackServer

PROCESS_TIMEOUT = 120.0  # s for a process to start or to end


def main_thread_holds() -> None:
    """Hold the interpreter lock in C until the process is killed."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def leaf() -> int:
    return 1


def deep(n: int) -> int:
    return deep(n - 1) + 1 if n else sum(leaf() for _ in range(50))


def recursion(over: threading.Event) -> None:
    while not over.is_set():
        for n in range(1, 300, 7):
            assert deep(n) == n + 50


def codes(over: threading.Event) -> None:
    while not over.is_set():
        made: dict[str, int] = {}
        exec(compile("def f(n):\n    return [i for i in range(n)]\nx = len(f(9))", "made", "exec"), made)
        assert made["x"] == 9


def errors(over: threading.Event) -> None:
    def generated() -> Iterator[int]:
        try:
            yield 1
            raise ValueError(2)
        finally:
            pass

    while not over.is_set():
        seen: list[object] = []
        try:
            seen.extend(generated())
        except ValueError as error:
            seen += error.args
        assert seen[-1:] == [2]


def garbage(over: threading.Event) -> None:
    while not over.is_set():
        circle: list[object] = []
        circle.append(circle)
        gc.collect()


def holds(over: threading.Event) -> None:
    """Hold the lock for a tenth of a second, again and again."""
    while not over.is_set():
        assert re.match(r"(a+)+$", "a" * 20 + "b") is None
        time.sleep(0.001)


WORK = (recursion, codes, errors, garbage, holds)


def child(prefix: Path, mode: str) -> None:
    server = StackServer(prefix)
    print("ready", flush=True)
    if mode == "holds":
        main_thread_holds()
    if mode == "sleeps":
        sys.stdin.read()
    over = threading.Event()
    failed: list[BaseException] = []

    def run(work: object) -> None:
        try:
            work(over)  # type: ignore[operator]
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(work,)) for work in WORK] if mode == "works" else []
    for thread in threads:
        thread.start()
    sys.stdin.read()  # until the parent closes it
    over.set()
    for thread in threads:
        thread.join()
    server.close()
    sys.exit(1 if failed else 0)


@contextmanager
def running(folder: Path, mode: str) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A child with a `StackServer`, which has begun; killed at the end if it still runs."""
    prefix = folder / f"{mode}.{random.getrandbits(32):08x}"
    command = [sys.executable, "-m", "tests.stacks", "--child", str(prefix), mode]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        begins = select.poll()  # a descriptor may be above those that `select.select` knows
        begins.register(process.stdout, select.POLLIN)
        assert begins.poll(PROCESS_TIMEOUT * 1e3), "it does not begin"
        assert process.stdout.readline() == b"ready\n"
        yield prefix, process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def finish(process: subprocess.Popen[bytes]) -> int:
    """Let it end, and return its exit code."""
    assert process.stdin is not None
    process.stdin.close()
    return process.wait(PROCESS_TIMEOUT)


def harass(prefix: Path, process: subprocess.Popen[bytes], dumps: int, seconds: float) -> Counter[str]:
    """Take stacks both ways, so many or for so long: it is asked, and its threads are signalled although they run."""
    did: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while did.total() < dumps or time.monotonic() < until:
        if process.poll() is not None:
            raise AssertionError(f"the process has ended with {process.returncode} after {dict(did)}")
        taken = stacks.take(prefix, process.pid)
        did["signalled, held" if taken.held else "asked" if taken.threads else "nothing"] += 1
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            if processes.catches(process.pid, int(thread), SIGNAL):
                did["signalled, running"] += stacks.signal_thread(process.pid, int(thread))
    return did


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(Path(arguments.child[0]), arguments.child[1])
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    total: Counter[str] = Counter()
    until = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        while (left := until - time.monotonic()) > 0:
            with running(Path(folder), "works") as (prefix, process):
                total += harass(prefix, process, 1, min(20.0, left))
                code = finish(process)
                if code != 0:
                    sys.exit(f"a process ended with {code} after {dict(total)}")
                print(f"{max(0.0, until - time.monotonic()):5.0f} s left, {dict(total)}, no harm", flush=True)


if __name__ == "__main__":
    main()
