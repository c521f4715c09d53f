"""What `ftcomm bench rejoin` makes of the steps that replicas write down and of the events of the job."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from click.testing import CliRunner

from ftcomm.bench import rejoin
from ftcomm.bench.cli import bench
from ftcomm.bench.rejoin import EXPERIMENT, Rejoin, RejoinRequest, TimedStep, footer, layers_for, lengths
from ftcomm.errors import SettingsError


def step(number, start, replica=0, pid=10, counted=3, members=3):
    return TimedStep(replica, pid, number, counted, members, start, start + 0.5)


def test_a_step_lasts_until_the_next_begins_on_the_same_process():
    steps = [step(0, 1.0), step(0, 1.5, replica=1, pid=11), step(1, 2.0, counted=2), step(2, 4.0), step(3, 4.5, pid=12)]
    steps += [step(4, 9.0)]  # a step is missing before it
    assert lengths(steps, lambda one: True) == [1.0, 2.0]
    assert lengths(steps, lambda one: one.counted == 3) == [1.0]


MADE = Rejoin(0, 2, 400_000_000, 2.0, 0.1, 3, {0: 0.05, 1: 0.01}, 1.0, 0.8, None, 2.5, 9.0)


def test_the_worst_stall_decides():
    assert MADE.share == 0.05
    assert footer([MADE]).endswith("5.00% of a step, allowed 10%: OK")
    assert footer([MADE, Rejoin(1, 1, 1, 1.0, 0.1, 0, {0: 0.2}, 1.0, None, None, None, 1.0)]).endswith(
        "20.00% of a step, allowed 10%: FAILED"
    )


def test_a_line_stands_under_its_heading():
    (table,) = EXPERIMENT.tables
    assert len({len(text) for text in (*table.heading(), *table.lines(MADE))}) == 1
    assert table.lines(MADE)[0].split() == [
        "1",
        "2",
        "400.0",
        "2.00",
        "200",
        "50.00",
        "5.00",
        "1.000",
        "0.800",
        "-",
        "2.500",
        "9.00",
    ]


def test_the_state_has_the_size_that_is_asked_for():
    assert 12 * 1024 * 1024 * layers_for(400_000_000) == pytest.approx(400_000_000, rel=0.02)
    assert layers_for(1) == 1


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (RejoinRequest(replicas=1), "--replicas 1: expected 2 to 1024"),
        (RejoinRequest(rejoins=0), "--rejoins 0, --batch 256"),
        (RejoinRequest(size=1000), "--size"),
        (RejoinRequest(size=1 << 50), "need about"),
    ],
)
def test_what_cannot_be_measured(request_, text):
    with pytest.raises(SettingsError, match=text):
        request_.check()


@pytest.mark.parametrize(("stall", "code"), [(0.05, 0), (0.5, 1)])
def test_the_command_fails_above_its_target(monkeypatch, tmp_path, stall, code):
    async def measure(request, report):
        await asyncio.sleep(0)
        assert request == RejoinRequest(mbps=20.0)
        report.add(Rejoin(0, 2, 400_000_000, 2.0, 0.1, 3, {0: stall}, 1.0, 0.8, None, 2.5, 9.0))

    monkeypatch.setattr(rejoin, "EXPERIMENT", dataclasses.replace(EXPERIMENT, measure=measure))
    done = CliRunner().invoke(bench, ["rejoin", "--mbps", "20", "--json", str(tmp_path / "out.json")])
    assert done.exit_code == code, done.output
    assert '"nbytes": 400000000' in (tmp_path / "out.json").read_text()
