"""The launcher tells why a job stands still as soon as that is reported: the line of a rank that holds its interpreter,
and of two groups that wait for each other. `python -m tests.verdicts` provokes the other kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verdicts.provoke import once


@pytest.mark.protocol
@pytest.mark.parametrize("kind", ["own code, held", "other group"])
def test_the_verdict_on_a_stall(tmp_path: Path, kind: str) -> None:
    told, verdict = once(kind, tmp_path)
    assert not told.mistake, told
    assert verdict["since"] < verdict["removal"][0] < verdict["removal"][1]
    assert "acts.py" in verdict["others"]
