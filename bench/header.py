"""Notes beside each figure where, when, with which versions and by which command it was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HEADER_VERSION = 1  # of the JSON's shape


def header() -> dict[str, str | int | float]:
    """Returns what a result depends on: command, machine and versions. Reads /proc; does not import torch."""
    return {
        "schema": HEADER_VERSION,
        "command": f"{_program()} {shlex.join(sys.argv[1:])}",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("ftcomm", "torch", "numpy")},
    }


def header_lines(fields: dict[str, str | int | float]) -> list[str]:
    """Returns comment lines for the top of a table."""
    versions = ", ".join(f"{name} {fields[name]}" for name in ("ftcomm", "torch", "numpy", "python"))
    return [
        f"# {fields['command']}",
        f"# {fields['date']}; {versions}, Linux {fields['kernel']}",
        f"# {fields['cpu']}, {fields['cores']} cores, {fields['memory_gb']} GB; load before {fields['load']}",
    ]


def device_fields() -> dict[str, str | int | float]:
    """Returns what figures of kernels depend on beside it. Imports torch; asks the driver, which may take a second."""
    import torch

    there = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if there else "none",
        "gpus": torch.cuda.device_count() if there else 0,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "cuda": torch.version.cuda or "none",
        **{name: _version(name) for name in ("triton", "cupy-cuda12x", "cupy-cuda13x", "pytest")},
        "git": _said("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
    }


def device_lines(fields: dict[str, str | int | float]) -> list[str]:
    versions = ", ".join(f"{name} {fields[name]}" for name in ("driver", "cuda", "triton"))
    return [f"# GPU: {fields['gpu']} ({fields['gpus']}); {versions}; {fields['git']}"]


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _program() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of a module that `python -m` runs
    return Path(sys.argv[0]).name if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _said(*command: str) -> str:
    """Returns what a program says, which need not be there, about something that it need not know."""
    if shutil.which(command[0]) is None:
        return "none"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else "none"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
