"""What a script's process knows of its own end when that comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys
from ftcomm import ending
atexit.register(lambda: print(ending.failure()))
ending.watch()
ending.watch()
{}
"""


@pytest.mark.parametrize(
    ("end", "said", "code"),
    [
        ("", "", 0),
        ("sys.exit()", "", 0),
        ("sys.exit(3)", "its script exited with code 3", 3),
        ("exit(3)", "its script exited with code 3", 3),
        ("quit('no more')", "its script exited with code 1", 1),
        ("raise ValueError", "its script failed with ValueError", 1),
    ],
)
def test_a_script_that_gives_up_is_known_at_its_end(end: str, said: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(end)], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == (said, code), done.stderr
