"""The transcripts say what the state machines of the control plane say to each other; see `conversation`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conversation import FOLDER, played

pytestmark = pytest.mark.protocol

TRANSCRIPTS = sorted(FOLDER.glob("*.txt"))


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 10


def test_the_readme_lists_them_all() -> None:
    said = (FOLDER / "README.md").read_text()
    assert not [path.name for path in TRANSCRIPTS if f"({path.name})" not in said]


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    """If the change is meant: `.venv/bin/python -m tests.simulation.conversation`, and read the diff."""
    expected = path.read_text()
    assert played(expected) == expected
