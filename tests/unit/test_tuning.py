"""Switch points: what a file says, what is refused, and that members with others are told so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftcomm.errors import SettingsError
from ftcomm.settings import Settings
from ftcomm.settings.tuning import BUILT_IN, EVER, differ, up_to
from ftcomm.settings.tuning_file import load
from ftcomm.transport.connect import connect, here_is
from ftcomm.transport.segment import OtherEngine, Segment

ENVIRONMENT = {
    "FTCOMM_COORDINATOR": "127.0.0.1:29400",
    "FTCOMM_TOKEN": "secret",
    "FTCOMM_REPLICA": "0",
    "FTCOMM_REPLICAS": "1",
}


def write(path: Path, **fields: Any) -> str:
    path.write_text(json.dumps({"version": 1, **fields}))
    return str(path)


def test_a_size_is_that_of_the_next_number_of_members_that_was_measured() -> None:
    points = ((2, EVER), (4, 100), (8, 10))
    assert [up_to(points, members) for members in (1, 2, 3, 4, 5, 8, 16)] == [EVER, EVER, 100, 100, 10, 10, 10]


def test_a_file_goes_over_what_is_built_in(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", one_shot_on_one_host={"4": 9}, one_shot_between_hosts={"3": 7}, measured={"a": 1})
    settings = Settings.from_env({**ENVIRONMENT, "FTCOMM_TUNING": path})
    tuning = settings.tuning
    assert [up_to(tuning.one_host, members) for members in (2, 3, 4)] == [EVER, 9, 9]
    assert up_to(tuning.one_host, 5) == up_to(BUILT_IN.one_host, 5)
    assert up_to(tuning.hosts, 3) == 7
    assert tuning.ring == BUILT_IN.ring
    assert str(tuning).endswith(f" {path}")
    assert Settings.from_env(ENVIRONMENT).tuning == BUILT_IN


def test_files_of_other_names_may_say_the_same(tmp_path: Path) -> None:
    one, two, other = (
        load(write(tmp_path / name, direct_before_ring={"3": size}))
        for name, size in (("one", 5), ("two", 5), ("other", 6))
    )
    assert not differ(str(one), str(two))
    assert differ(str(one), str(other))
    assert differ(str(one), str(BUILT_IN))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory; name a file that `ftcomm bench tune` wrote"),
        (b"no json", "is no tuning file .*make it anew by `ftcomm bench tune`"),
        (b"\xff", "is no tuning file"),
        (b"{}", "missing required field `version`"),
        (b'{"version": 2}', r"Expected `int` <= 1 - at `\$.version`"),
        (b'{"version": 1, "one_shot": {}}', "unknown field `one_shot`"),
        (b'{"version": 1, "direct_before_ring": {"1": 5}}', "Expected `int` >= 2"),
        (b'{"version": 1, "direct_before_ring": {"1025": 5}}', "Expected `int` <= 1024"),
        (b'{"version": 1, "direct_before_ring": {"four": 5}}', "is no tuning file"),
        (b'{"version": 1, "one_shot_between_hosts": {"4": -1}}', "Expected `int` >= 0"),
        (b'{"version": 1, "one_shot_on_one_host": {"4": "64K"}}', "Expected `int`, got `str`"),
    ],
)
def test_what_is_no_tuning_file_is_refused_by_name(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError, match=f"FTCOMM_TUNING={path}.*{said}"):
        Settings.from_env({**ENVIRONMENT, "FTCOMM_TUNING": str(path)})


@pytest.mark.parametrize("mode", ["auto", "shm", "tcp"])
def test_a_member_with_other_points_is_refused_with_both_files(tmp_path: Path, mode: str) -> None:
    tuning = load(write(tmp_path / "other.json", direct_before_ring={"3": 5}))
    segment = Segment()
    here, there = here_is("127.0.0.1", 1, segment), here_is("127.0.0.1", 1, segment, tuning)
    said = rf"replica 1 cannot take part: its switch points are {tuning.digest} .*other.json; here they are .* built in"
    with pytest.raises(OtherEngine, match=said + ".*FTCOMM_TUNING to the same file"):
        connect(0, here, 1, there, epoch=1, mode=mode, dial=None, on_lost=lambda *lost: None)  # type: ignore[arg-type]


def test_an_address_has_room_for_any_path() -> None:
    long = dataclasses.replace(BUILT_IN, source="/" + "x" * 4000)
    address = here_is("127.0.0.1", 1, Segment(), long)
    assert msgspec.json.decode(msgspec.json.encode(address), type=type(address)) == address
