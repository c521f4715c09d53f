"""What a script's process knows of its own end when that comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys
from sys import exit as imported
from ftcomm.process import ending
atexit.register(lambda: print(ending.over() and ending.failure()))
ending.watch()
ending.watch()

def main(how):
    for _ in range(2):
        if how == "return":
            return 3
        if how == "raise":
            raise SystemExit(3)
        if how == "break":
            break
    ending.complete()

{}
"""


RAISED = "its script raised SystemExit before the end of a step loop"


@pytest.mark.parametrize(
    ("end", "said", "code"),
    [
        ("", "", 0),
        ("sys.exit()", "", 0),
        ("sys.exit(3)", "its script exited with code 3", 3),
        ("exit(3)", "its script exited with code 3", 3),
        ("quit('no more')", "its script exited with code 1", 1),
        ("raise ValueError", "its script failed with ValueError", 1),
        ("raise SystemExit(3)", RAISED, 3),
        ("imported(3)", RAISED, 3),
        ("raise SystemExit(main('return'))", RAISED, 3),
        ("main('break')", "", 0),
        ("main('raise')", RAISED, 3),
        ("main('complete')\nraise SystemExit", "", 0),
        ("main('complete')\nending.goes_on()\nraise SystemExit(3)", RAISED, 3),
        ("try: sys.exit(3)\nexcept SystemExit: pass", "", 0),
        ("try: raise ValueError\nexcept ValueError: sys.exit(0)", "", 0),
        ("sys.last_value = ValueError()\nassert not ending.over()\ndel sys.last_value", "", 0),
    ],
)
def test_a_script_that_gives_up_is_known_at_its_end(end: str, said: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{}", end)], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (said.strip(), code), done.stderr
