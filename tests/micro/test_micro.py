"""The micro-benchmarks run, each once; what they measure is nobody's business here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.protocol
def test_each_runs() -> None:
    path = Path(__file__).with_name("bench_parts.py")
    command = [sys.executable, "-m", "pytest", str(path), "-q", "--benchmark-disable", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230, cwd=path.parents[2])
    assert done.returncode == 0, done.stdout
    assert "failed" not in done.stdout
