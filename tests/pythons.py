"""A job of NumPy arrays without torch on each Python that ftcomm is for: all modules are imported that need no more
than is installed, a replica is killed and comes back, and all end with the same arrays.

    make test-pythons                                          # those of PYTHONS that there are
    python -m tests.pythons build/pythons python3.10 python3.14

Each has an environment of its own, in which ftcomm is installed from this tree.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("numpy>=2", "msgspec>=0.19", "rich>=13", "click>=8.1")  # what pyproject.toml names, but torch
ABSENT = re.compile(r"No module named '(torch|triton|cupy|etcd3gw|jax|ray|lightning|accelerate|transformers)\b")
MODULES = """
import importlib, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import ftcomm
for each in pkgutil.walk_packages(ftcomm.__path__, "ftcomm.", onerror=lambda name: None):
    if each.name.startswith("ftcomm.bench"):
        continue
    try:
        importlib.import_module(each.name)
    except Exception as error:
        print(f"{each.name}: {type(error).__name__}: {error}")
"""
JOB = """
import hashlib, os, time
import numpy as np
import ftcomm

group = ftcomm.init()
came, params = not group.contributes, {"w": np.zeros(50_000)}
for step in ftcomm.steps(10**9, {"params": params}):
    gradient = np.sin(params["w"] + group.replica + step)
    ftcomm.allreduce(gradient, "avg")
    params["w"] -= 0.01 * gradient
    if step == 20 and group.replica == 1 and not came:
        os.kill(os.getpid(), 9)
    back = np.array([float(came and group.contributes)])
    ftcomm.allreduce(back, "max")
    if back[0]:
        break
    time.sleep(0.01)
print("arrays", hashlib.blake2b(params["w"].tobytes(), digest_size=8).hexdigest(), flush=True)
"""


class Failed(Exception):
    """What is wrong on one Python."""


def run(*command: str | Path, seconds: float = 600.0) -> str:
    """Returns what a command has printed. Raises `Failed` if it fails or takes longer."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=ROOT.parent,
            env={**os.environ, "PYTHONPATH": ""},
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise Failed(str(error)) from error
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def version_of(python: str) -> str | None:
    """Returns the version of an interpreter; None if there is none that runs."""
    try:
        return run(python, "-c", "import platform; print(platform.python_version())", seconds=60.0).strip()
    except Failed:
        return None


def shown(python: str, version: str, folder: Path) -> str:
    """Returns what was shown on this interpreter. Raises `Failed`."""
    here = folder / version
    interpreter = here / "bin" / "python"
    run(python, "-m", "venv", "--clear", here)
    run(interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check", *NEEDED)
    run(interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", ROOT)
    wrong = [line for line in run(interpreter, "-c", MODULES).splitlines() if not ABSENT.search(line)]
    if wrong:
        raise Failed("these modules cannot be imported:\n" + "\n".join(wrong))
    script = here / "job.py"
    script.write_text(JOB)
    said = run(here / "bin" / "ftcomm", "run", "--replicas", "3", script)
    arrays = re.findall(r"arrays ([0-9a-f]+)", said)
    if len(arrays) != 3 or len(set(arrays)) != 1 or "contribute 1" not in said:
        raise Failed(f"the replicas did not end alike ({arrays}):\n{said}")
    return f"Python {version}: a replica was killed and came back, and three ended with the arrays {arrays[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the environments")
    parser.add_argument("pythons", nargs="+", help="interpreters")
    arguments = parser.parse_args()
    shown_on, failed = 0, False
    for python in arguments.pythons:
        version = version_of(python)
        if version is None:
            print(f"{python}: there is none")
            continue
        try:
            print(shown(python, version, arguments.folder.resolve()), flush=True)
            shown_on += 1
        except Failed as error:
            failed = True
            print(f"{python}: {error}", flush=True)
    return 1 if failed or not shown_on else 0


if __name__ == "__main__":
    sys.exit(main())
