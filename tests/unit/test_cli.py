"""The `ftcomm` command: light, and a mistake of the user is one line and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftcomm.cli import LazyGroup, main


def call(capfd: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["coordinator", "--help"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    script = (
        "import sys\n"
        "from ftcomm.cli import main\n"
        "try:\n"
        f"    main({argv!r})\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'asyncio', 'msgspec', 'rich'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage: ftcomm" in done.stdout


def test_help_lists_all_commands_without_loading_them(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capfd, "--help")
    assert code == 0
    for name in ("bench", "coordinator", "demo", "run"):
        assert f"\n  {name} " in out


def test_help_of_run_documents_the_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capfd, "run", "--help")
    listed = {int(line.split()[0]) for line in out.splitlines() if line.split() and line.split()[0].isdigit()}
    assert listed == {0, 1, 2, 3, 130}


def test_lazy_commands_point_at_modules_of_this_package() -> None:
    assert {"bench", "chaos", "demo", "restart", "status"} <= set(LazyGroup.LAZY)
    for where, line in LazyGroup.LAZY.values():
        module, _, name = where.partition(":")
        assert module.startswith("ftcomm.")
        assert name
        assert line.endswith(".")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "train.py").write_text("print('ran')\n")
    (tmp_path / "file").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--replicas", "0", "train.py"], "--replicas 0: a job needs at least 1 replica"),
        (["--replicas", "2", "--ranks-per-replica", "0", "train.py"], "a replica needs at least 1 rank"),
        (["--replicas", "2", "--ranks-per-replica", "4", "--host-ranks", "5", "train.py"], "expected 2 to 4"),
        (["--replicas", "2", "--ranks-per-replica", "4", "--host-ranks", "1", "train.py"], "expected 2 to 4"),
        (["--replicas", "2", "--min-replicas", "3", "train.py"], "--min-replicas 3: expected 1 to 2"),
        (["--replicas", "2", "--max-restarts", "-1", "train.py"], "--max-restarts -1"),
        (["--replicas", "2", "--grace", "0", "train.py"], "--grace 0.0: expected a positive number of seconds"),
        (["--replicas", "2", "--init-timeout", "-1", "train.py"], "--init-timeout -1.0: expected a positive number of"),
        (["--replicas", "2", "--op-timeout", "5", "--heartbeat-timeout", "5", "train.py"], "Raise the first or lower"),
        (["--replicas", "2", "absent.py"], "the script absent.py does not exist in "),
        (["--replicas", "2", "package"], "is a directory without a __main__.py"),
        (["--replicas", "2", "python", "train.py"], "python is no script: leave it away"),
        (["--replicas", "2", "-m", "absent_module"], "no module named absent_module"),
        (["--replicas", "2", "-m", "package.absent"], "no module named package.absent"),
        (["--replicas", "2", "-m", "package"], "no module named package.__main__"),
        (["--replicas", "2", "--log-dir", "file", "train.py"], "--log-dir file: "),
        (["--replicas", "2", "--log-dir", "file/below", "train.py"], "--log-dir file/below: "),
        (["--replicas", "2", "--events", "absent/e.jsonl", "train.py"], "--events absent/e.jsonl: "),
    ],
)
@pytest.mark.usefixtures("here")
def test_run_tells_what_cannot_work(capfd: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    code, out, err = call(capfd, "run", *argv)
    assert code == 2
    assert out == ""
    assert said in err
    assert err.startswith("ftcomm: ")
    assert err.count("\n") == 1


@pytest.mark.usefixtures("here")
def test_a_missing_option_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capfd, "run", "train.py")
    assert code == 2
    assert "--replicas" in err


def test_an_unsafe_directory_for_runs_is_refused(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = here / f"ftcomm-{os.getuid()}"
    base.mkdir()
    base.chmod(0o777)
    code, _, err = call(capfd, "run", "--replicas", "1", "train.py")
    assert code == 2
    assert "is not a directory that only you can use; remove it" in err


@pytest.mark.usefixtures("here")
def test_coordinator_without_a_token_says_how_to_make_one(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FTCOMM_TOKEN", raising=False)
    code, _, err = call(capfd, "coordinator", "--replicas", "2")
    assert code == 2
    assert "secrets.token_hex(16)" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--replicas", "0"], "expected 1 or more"),
        (["--replicas", "2", "--port", "65536"], "--port 65536: expected 0"),
        (["--replicas", "2", "--op-timeout", "0"], "expected a positive number of seconds"),
        (["--replicas", "2", "--op-timeout", "1"], "Raise the first above"),
        (["--replicas", "2", "--port", "0", "--store", "absent/views"], "absent/views"),
        (["--replicas", "2", "--standby"], "--standby needs views that another host can read"),
        (["--replicas", "2", "--store", "etcd://a:1"], "etcd://etcd:2379/my-job"),
        (["--replicas", "2", "--store", "etcd://a:1/b", "--heartbeat-timeout", "0.5"], "expected 1 s or more"),
    ],
)
@pytest.mark.usefixtures("here")
def test_coordinator_tells_what_cannot_work(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str], said: str
) -> None:
    monkeypatch.setenv("FTCOMM_TOKEN", "secret")
    code, _, err = call(capfd, "coordinator", *argv)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
