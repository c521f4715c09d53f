"""The launcher tells why a job stands still as soon as that is reported: the line of a rank that holds its interpreter,
and of two groups that wait for each other. `python -m tests.verdicts` provokes the other kinds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.verdicts.provoke import once, with_small_disk


@pytest.mark.protocol
@pytest.mark.parametrize("kind", ["own code, held", "other group"])
def test_the_verdict_on_a_stall(tmp_path: Path, kind: str) -> None:
    told, verdict = once(kind, tmp_path)
    assert not told.mistake, told
    assert verdict["since"] < verdict["removal"][0] < verdict["removal"][1]
    assert "acts.py" in verdict["others"]


def test_a_small_disk_is_gone_with_the_command_that_has_it(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("mounts of one's own need root")
    command = [*with_small_disk(full := tmp_path / "it's full"), "sh", "-c", "echo begun; read end"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        there, here = (Path(f"/proc/{who}/mountinfo").read_text() for who in (process.pid, "self"))
        (Path(f"/proc/{process.pid}/root{full}") / "written").touch()
        process.kill()
    escaped = str(full).replace(" ", "\\040")
    assert (escaped in there, escaped in here) == (True, False)
    assert not list(full.iterdir()), "it was another disk"
