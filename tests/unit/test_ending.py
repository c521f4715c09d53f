"""What a script's process knows of its own end when that comes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ftcomm.control.script_end import ScriptEnd

SCRIPT = """
import atexit, sys
from sys import exit as imported
from ftcomm.process import ending
stdout = sys.stdout
atexit.register(lambda: print(ending.over() and (ending.failure() or ""), file=stdout, flush=True))
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


EXITED = "its script exited with code 3"
FAILED = "its script exited with code 1"
RAISED = "its script raised SystemExit before the end of a step loop"  # and that is all that is known


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (ScriptEnd.by(KeyError), "its script failed with KeyError"),
        (ScriptEnd.by(SystemExit), RAISED),
        (ScriptEnd.by(type("a b\n" * 100, (Exception,), {})), f"its script failed with {'a_b_' * 32}"),
        (ScriptEnd.by(type("", (Exception,), {})), "its script failed with _"),
        (ScriptEnd.with_code(3), EXITED),
        (ScriptEnd.with_code(1 << 70), "its script exited with code 2147483647"),
        (ScriptEnd.with_code(-(1 << 70)), "its script exited with code -2147483648"),
    ],
)
def test_any_end_goes_into_a_message_and_into_an_event(end: ScriptEnd, text: str) -> None:
    assert str(end) == text
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(end), type=ScriptEnd) == end
    assert ScriptEnd.of_event({"kind": "suspect", "replica": 1, **end.fields}) == end


@pytest.mark.parametrize(
    "fields", [["", None], ["KeyError", 3], ["a b", None], ["x\n", None], ["x" * 129], ["", 1 << 40], ["", 1.5]]
)
def test_what_is_no_end_is_refused(fields: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=ScriptEnd)


def says(*argv: str) -> tuple[str, int]:
    """Returns what a script says of its end, and its exit code."""
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, check=False)
    assert "Exception ignored" not in done.stderr
    return done.stdout.strip(), done.returncode


@pytest.mark.parametrize(
    ("end", "said", "code"),
    [
        ("", "", 0),
        ("sys.exit()", "", 0),
        ("sys.exit(3)", EXITED, 3),
        ("exit(3)", EXITED, 3),
        ("quit('no more')", FAILED, 1),
        ("raise ValueError", "its script failed with ValueError", 1),
        ("sys.exit(True)", FAILED, 1),
        ("sys.exit(False)", "", 0),
        ("sys.exit(0.0)", FAILED, 1),  # a zero that is no int, as of NumPy
        ("class Odd:\n    def __eq__(self, other): raise ValueError\nsys.exit(Odd())", FAILED, 1),  # an array
        ("raise SystemExit(3)", EXITED, 3),
        ("raise SystemExit('no more')", FAILED, 1),
        ("raise SystemExit(main('return'))", EXITED, 3),
        ("raise SystemExit(main('break'))", "", 0),
        ("main('break')", "", 0),
        ("main('raise')", EXITED, 3),
        ("main('complete')\nraise SystemExit", "", 0),
        ("main('complete')\nraise SystemExit(3)", EXITED, 3),
        ("class Own(SystemExit): pass\nmain('complete')\nraise Own(3)", EXITED, 3),
        ("sys.stdout = open('/dev/null', 'w')\nsys.stderr.flush()\nraise SystemExit(3)", EXITED, 3),
        ("try: sys.exit(3)\nexcept SystemExit: pass", "", 0),
        ("try: sys.exit(3)\nexcept SystemExit: pass\nraise SystemExit(0)", "", 0),
        ("try: raise ValueError\nexcept ValueError: sys.exit(0)", "", 0),
        ("sys.last_value = ValueError()\nassert not ending.over()\ndel sys.last_value", "", 0),
    ],
)
def test_a_script_that_gives_up_is_known_at_its_end(tmp_path: Path, end: str, said: str, code: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("{}", end))
    assert says(str(tmp_path / "script.py")) == (said, code)


@pytest.mark.parametrize(
    ("end", "said", "code"),
    [
        ("raise SystemExit(3)", RAISED, 3),
        ("raise SystemExit(main('return'))", RAISED, 3),
        ("main('complete')\nraise SystemExit(3)", "", 3),
        ("main('complete')\nending.goes_on()\nraise SystemExit(3)", RAISED, 3),
        ("sys.exit(3)", EXITED, 3),
        ("main('break')", "", 0),
    ],
)
def test_of_a_command_it_is_known_whether_its_step_loop_came_to_its_end(end: str, said: str, code: int) -> None:
    assert says("-c", SCRIPT.replace("{}", end)) == (said, code)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="is an exception there while it is on its way")
def test_of_an_imported_exit_it_is_known_whether_its_step_loop_came_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("{}", "imported(3)"))
    assert says(str(tmp_path / "script.py")) == (RAISED, 3)


def test_what_a_stream_holds_that_the_script_drops_is_written_as_it_goes() -> None:
    script = """
import os, sys
from ftcomm.process import ending
sys.stdout = open(1, "w", closefd=False)
ending.watch()
print("before")
sys.stdout = sys.__stdout__
os.write(1, b"behind")
"""
    assert says("-c", script) == ("before\nbehind", 0)
