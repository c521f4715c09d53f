"""The live view of a real job under kills: what the page shows, what the history keeps, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from ftcomm.dashboard.ranks import NO_RECORDING
from ftcomm.diagnosis.facts import JobFacts
from ftcomm.diagnosis.verdict import StallVerdict
from ftcomm.launch import Launcher, RunOptions
from ftcomm.launch.diagnose import Diagnosis
from ftcomm.launch.listen import Listen
from ftcomm.monitoring.causes import Kind
from ftcomm.monitoring.history import HistoryFile
from tests.process.browser import browser, chromium

pytestmark = pytest.mark.protocol

PAGE_TIMEOUT = 240.0  # s
ELEMENTS = 100_000  # of an op: as many go around the ring
SCRIPT = """
    import time
    import numpy as np
    import ftcomm

    ftcomm.init()
    print("<b>a token of mine:</b>", __import__("os").environ["FTCOMM_TOKEN"])
    weights = {"w": np.zeros(ELEMENTS, np.float32)}
    for step in ftcomm.steps(1_000_000, weights):
        gradient = np.full(ELEMENTS, step, np.float32)
        ftcomm.allreduce(gradient, op="avg")
        weights["w"] += gradient
        ftcomm.report(step=step)
        time.sleep(0.02)
"""


class RunningJob:
    """A job with a live view, in a thread. `until` waits for an event."""

    def __init__(self, directory: Path, name: str = "script.py", **others: Any) -> None:
        """`others` are further options of the launcher."""
        path = directory / name
        path.write_text(textwrap.dedent(SCRIPT).replace("ELEMENTS", str(ELEMENTS)))
        self.history = directory / "history.sqlite"
        options = RunOptions(
            script=str(path),
            history=self.history,
            dashboard=Listen("127.0.0.1", 0),
            env={"FTCOMM_LOG": "warning", "FTCOMM_ALGORITHM": "ring"},
            transport="tcp",
            **{"replicas": 3, "backoff": 0.01, **others},
        )
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []
        self._changed = threading.Condition()
        self.launcher = Launcher(options, self._event, lambda *line: None, self._say)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="job")

    def _run(self) -> None:
        self._loop.run_until_complete(self.launcher.run())
        self._loop.close()

    def _event(self, event: dict[str, Any]) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def _say(self, line: str) -> None:
        with self._changed:
            self.said.append(line)
            self._changed.notify_all()

    def until(self, done: Callable[[], Any]) -> Any:
        with self._changed:
            assert self._changed.wait_for(done, PAGE_TIMEOUT), "\n".join(self.said)
            return done()

    def contributes(self, replica: int, after: int) -> bool:
        """Whether a view behind the first `after` events has the replica contributing."""
        return any(
            event["kind"] == "view" and {"replica": replica, "contributing": True} in event["members"]
            for event in self.events[after:]
        )

    def kill(self, replica: int, number: int = signal.SIGKILL) -> None:
        """Send a signal, and wait until the replica contributes again."""
        before = len(self.events)
        os.kill(self.launcher.pids()[replica, 0], number)
        self.until(lambda: any(e["kind"] == "process_exited" and e["replica"] == replica for e in self.events[before:]))
        self.until(lambda: self.contributes(replica, before))

    def tell(self, found: Diagnosis) -> None:
        """Let the launcher tell a verdict."""
        self._loop.call_soon_threadsafe(self.launcher._tell_why, found)

    @property
    def url(self) -> str:
        found = self.until(lambda: [line for line in self.said if "live view: http" in line])
        return found[0].split()[-1]

    @contextlib.contextmanager
    def running(self) -> Iterator[RunningJob]:
        self._thread.start()
        try:
            self.until(lambda: any(event["kind"] == "report" for event in self.events))
            yield self
        finally:
            self.end()

    def end(self) -> None:
        if self._thread.is_alive():
            for _ in range(2):
                self._loop.call_soon_threadsafe(self.launcher.interrupt)
            self._thread.join(PAGE_TIMEOUT)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningJob]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("FTCOMM_DASHBOARD_TOKEN", raising=False)
    with RunningJob(tmp_path).running() as job:
        yield job


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PAGE_TIMEOUT)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def test_the_page_of_a_job_under_kills(job: RunningJob, tmp_path: Path) -> None:
    chromium()
    port, token = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", job.url).groups()  # type: ignore[union-attr]
    secret = job.launcher._token
    with browser(tmp_path / "profile") as page:
        wait = WebDriverWait(page, PAGE_TIMEOUT)

        def text(css: str) -> str:
            return page.find_element(By.CSS_SELECTOR, css).text

        page.get(job.url)
        wait.until(lambda page: text("#figure-members").startswith("3"))
        assert "token" not in page.current_url
        assert len(page.find_elements(By.CSS_SELECTOR, "#grid .replica.training")) == 3
        assert text("#none") == "None so far."

        job.kill(1)
        wait.until(lambda page: "killed by SIGKILL" in text("#rows"))
        job.kill(2, signal.SIGSEGV)
        wait.until(lambda page: "crashed with SIGSEGV" in text("#rows"))
        wait.until(lambda page: len(page.find_elements(By.CSS_SELECTOR, "#grid .replica.training")) == 3)
        assert not page.find_element(By.ID, "none").is_displayed()
        # On a busy machine a replica may come back too late for its change of view, which interrupts it once more.
        rows = page.execute_script(
            "return Array.from($('rows').rows, ({ cells }) => Array.from(cells, (cell) => cell.innerText))"
        )
        signalled = [row for row in rows if row[2] == "signal"]
        assert [row[1] for row in signalled] == ["2", "1"]  # the newest first
        assert all(float(row[5]) > 0 for row in signalled)
        assert "was killed by SIGKILL" in text("#log")
        assert page.execute_script("return $('rate').querySelectorAll('.mark').length === $('rows').rows.length")
        before = text("#figure-step")
        wait.until(lambda page: text("#figure-step") != before)  # it lives

        # The last lines of a rank, as text and without the secret of the job.
        page.find_elements(By.XPATH, "//*[@id='rows']/tr[td[3]='signal']")[1].click()
        more = page.find_element(By.CSS_SELECTOR, "#rows .more").text
        assert "<b>a token of mine:</b> ***" in more
        assert secret not in page.page_source

        # By keyboard: to the second replica, and what it does.
        page.find_element(By.ID, "grid").send_keys(Keys.ARROW_DOWN, Keys.ENTER)
        assert text("#rank h2") == "Replica 1, shard 0"
        assert "training" in text("#rank dl")
        wait.until(lambda page: "script.py:" in text("#doing"))  # the line of its op
        wait.until(lambda page: "script.py:" in text("#stack"))
        page.switch_to.active_element.send_keys(Keys.ESCAPE)

        # Why it stands still, as the launcher tells it, and one click to who holds it up.
        assert not page.find_element(By.ID, "why").is_displayed()
        verdict = StallVerdict("own code", ((2, 0),), since=1.0, who="Replica 2 is in <b>its own</b> code.")
        job.tell(Diagnosis(verdict, JobFacts(2.0)))
        wait.until(lambda page: text("#who") == verdict.who)
        wait.until(lambda page: "it goes on" in text("#told"))  # as the job does
        body = page.find_element(By.TAG_NAME, "body")
        body.send_keys("y")
        assert text("#rank h2") == "Replica 2, shard 0"
        page.switch_to.active_element.send_keys(Keys.ESCAPE)
        page.find_element(By.CSS_SELECTOR, "#culprits button").click()
        assert text("#rank h2") == "Replica 2, shard 0"
        page.switch_to.active_element.send_keys(Keys.ESCAPE)

        # Who makes the others wait, and one click to what it does.
        wait.until(lambda page: len(page.find_elements(By.CSS_SELECTOR, "#slowest tr")) == 3)
        slowest = page.execute_script("const [row] = $('slowest').rows; row.click(); return row.cells[0].innerText")
        assert text("#rank h2") == f"Replica {slowest}, shard 0"
        page.switch_to.active_element.send_keys(Keys.ESCAPE)

        # What goes between the replicas, and from whom to whom.
        wait.until(lambda page: text("#order") == "around the ring 0 → 1 → 2 → 0")
        assert len(page.find_elements(By.CSS_SELECTOR, "#ways .way")) == 3
        # In one turn of the page, which may make the rows anew in the next.
        links = page.execute_script(
            "return Array.from(document.querySelectorAll('#links tr'), (row) => row.innerText.trim().split(/\\s+/))"
        )
        assert {tuple(link[:2]) for link in links} == {("0", "1"), ("1", "2"), ("2", "0")}
        assert "a second of 400 kB of float32, ring by tcp" in text("#flows")
        dark = "return document.documentElement.dataset.theme"
        first = page.execute_script(dark)
        body.send_keys("t")
        assert {first, page.execute_script(dark)} == {"light", "dark"}
        body.send_keys("?")
        assert page.find_element(By.ID, "keys").is_displayed()
        assert [line for line in page.get_log("browser") if line["level"] == "SEVERE"] == []

        # Who is refused, and that nothing of the job is in what he gets.
        mine = {"Authorization": f"Bearer {token}"}
        assert get(int(port), "/metrics", **mine)[0] == 200
        for path in ("/", "/events", "/overview", "/metrics", "/page.js", "/rank?replica=0&shard=0", "/stack"):
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer wrong"}, 403),
                (mine | {"Origin": "http://evil.example"}, 403),
                (mine | {"Host": "evil.example"}, 403),
            ):
                got, answered, data = get(int(port), path, **headers)
                assert (got, b"script.py" in data) == (status, False), (path, headers)
                assert "frame-ancestors 'none'" in answered["Content-Security-Policy"]
        wrong = {"/../../etc/passwd": 404, "//[": 404, "/rank?replica=0&shard=-1": 400, "/stack": 400}
        for path, status in wrong.items():
            assert get(int(port), path, **mine)[0] == status, path
        assert b'ftcomm_interruptions_total{cause="signal"} 2.0' in get(int(port), "/metrics", **mine)[2]
        everything = get(int(port), "/overview", **mine)[2] + get(int(port), "/metrics", **mine)[2]
        assert secret.encode() not in everything
        assert token.encode() not in everything

        job.end()
        wait.until(lambda page: "the job has ended" in text("#link"))
    history = HistoryFile(job.history, write=False)
    [kept] = history.jobs()
    found = [interruption for _, interruption in history.interruptions()]
    history.close()
    assert kept.over
    killed = [x for x in found if x.cause.kind is Kind.SIGNAL]
    assert [(x.replica, x.cause.detail) for x in killed] == [(1, "killed by SIGKILL"), (2, "crashed with SIGSEGV")]
    assert all(x.price["absence"] > 0 for x in killed)
    assert all(x.back for x in {x.replica: x for x in found}.values())  # of each replica the last one
    assert secret not in json.dumps([x.lines for x in found])


def test_what_the_live_view_costs_can_be_measured(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, "-c", "from ftcomm.cli import main; main()", "bench", "dashboard", "--smoke"]
    done = subprocess.run([*command, "--json", str(found)], capture_output=True, text=True, timeout=PAGE_TIMEOUT)
    assert found.exists(), done.stderr
    [load] = json.loads(found.read_text())["loads"]
    assert load["events"] > 0
    assert load["browser"] is None


def test_a_coordinator_alone_has_a_live_view_without_what_only_a_launcher_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "the-token-of-a-live-view"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ftcomm = [sys.executable, "-c", "from ftcomm.cli import main; main()"]
    environment = {**os.environ, "FTCOMM_TOKEN": "0123456789abcdef", "FTCOMM_DASHBOARD_TOKEN": token}
    command = [*ftcomm, "coordinator", "--replicas", "2", "--port", "0", "--dashboard", "0", "--store", f"{tmp_path}/v"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as coordinator:
        try:
            assert coordinator.stderr is not None
            said = next(line for line in coordinator.stderr if "live view: http" in line)
            assert token not in said
            port = int(re.search(r":(\d+)/", said).group(1))  # type: ignore[union-attr]
            job = json.loads(get(port, "/overview", Authorization=f"Bearer {token}")[2])
            assert (job["state"], job["replicas"], job["contributing"]) == ("forming", 2, 0)
            status = subprocess.run([*ftcomm, "status", "--json"], capture_output=True, text=True, timeout=PAGE_TIMEOUT)
            assert json.loads(status.stdout)["run"] == job["run"]
            refused = subprocess.run(
                [*ftcomm, "restart", "--replica", "0"], capture_output=True, text=True, timeout=PAGE_TIMEOUT
            )
            assert refused.returncode != 0
            chromium()
            with browser(tmp_path / "profile") as page:
                page.get(f"http://127.0.0.1:{port}/?token={token}")
                wait = WebDriverWait(page, PAGE_TIMEOUT)
                wait.until(lambda page: len(page.find_elements(By.CSS_SELECTOR, "#grid .replica")) == 2)
                for panel in ("why", "stragglers", "traffic"):
                    assert not page.find_element(By.ID, panel).is_displayed()
                page.find_element(By.ID, "grid").send_keys(Keys.ENTER)
                wait.until(lambda page: NO_RECORDING in page.find_element(By.ID, "doing").text)
                wait.until(lambda page: not page.find_element(By.ID, "stacks").is_displayed())
        finally:
            coordinator.send_signal(signal.SIGTERM)
            coordinator.wait(PAGE_TIMEOUT)
    assert list((tmp_path / f"ftcomm-{os.getuid()}").glob("*/control")) == []
