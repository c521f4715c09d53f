"""Members that are set up differently do not begin: within seconds one goes and says why, with what both have."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ftcomm.engines import host
from ftcomm.settings import Settings
from ftcomm.settings.tuning_file import load
from ftcomm.transport.segment import HOST

from .bodies import reduce_forever
from .job import Job

pytestmark = pytest.mark.protocol

OTHER = dataclasses.replace(HOST, slots=2 * HOST.slots, chunk=HOST.chunk // 2)  # of as many bytes


def other_points(settings: Settings, arguments: dict[str, Any]) -> None:
    if settings.replica == 1:
        object.__setattr__(settings, "tuning", load(arguments["file"]))


def other_layout(settings: Settings, arguments: dict[str, Any]) -> None:
    if settings.replica == 1:
        host.layout_for = lambda transport, layout: OTHER  # type: ignore[assignment]


@pytest.mark.parametrize(("what", "transport"), [("points", "tcp"), ("layout", "shm")])
def test_who_is_set_up_differently_is_told_so(tmp_path: Path, transport: str, what: str) -> None:
    file = tmp_path / "points of mine.json"
    file.write_text(json.dumps({"version": 1, "one_shot_on_one_host": {"4": 12345}}))
    prepare = other_points if what == "points" else other_layout
    with Job(
        tmp_path,
        replicas=3,
        body=reduce_forever,
        transport=transport,
        prepare=prepare,
        file=str(file),
        elements=1000,
        steps=10_000_000,
        heartbeat_timeout=5.0,
    ) as job:
        assert job.join(1) == [1]
        [(_, _, text)] = job.errors()
        if what == "points":
            said = rf"its switch points are \w+ (built in|{re.escape(str(file))}); here they are \w+ ", "FTCOMM_TUNING"
        else:
            said = rf"{OTHER.slots} slots of {OTHER.chunk} bytes", rf"{HOST.slots} slots of {HOST.chunk} bytes"
        assert all(re.search(each, text) for each in said), text
        job.wait_contributing({0, 2})
        job.drain()
        assert job.join(0) == job.join(2) == [0]
