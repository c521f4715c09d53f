"""The wheel: what is in it, under which names, and how much `import ftcomm` costs."""

from __future__ import annotations

import ast
import email.message
import email.parser
import fcntl
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ftcomm
from ftcomm.torch.versions import untested
from tests.rigs.sources import files, nodes

ROOT = Path(__file__).resolve().parents[2]
DIST = ROOT / ".ci" / "dist.py"
URL = "https://example.org/owner/ftcomm"
FOLDERS = {"ftcomm": "ftcomm", "bench": "ftcomm/bench", "control": "ftcomm/control", "kernels": "ftcomm/kernels"}


def run(*command: str, cwd: Path) -> str:
    """stdout of the command; its stderr is in the failure."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def dist(out: Path) -> dict[str, Path]:
    """What `make dist` makes: the files by their suffix."""
    run(sys.executable, str(DIST), str(out), "--changed", "--url", URL, cwd=out.parent)
    return {file.suffix: file for file in out.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By whichever worker needs it first."""
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out = folder / "dist" / "first"
    out.parent.mkdir(exist_ok=True)
    with (out.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return {file.suffix: file for file in out.iterdir()} if out.exists() else dist(out)


@pytest.fixture(scope="module")
def wheel(built: dict[str, Path]) -> Path:
    return built[".whl"]


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def headers(wheel: Path) -> email.message.Message:
    return email.parser.Parser().parsestr(metadata(wheel, "METADATA"))


def test_every_module_is_in_the_wheel_under_its_import_name(names: set[str]) -> None:
    expected = {
        f"{target}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    shipped = {name for name in names if name.endswith(".py")}
    assert expected == shipped, "a new folder has to be named in [tool.setuptools] packages of pyproject.toml"


def test_ftcomm_is_the_only_top_level_name(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ftcomm"}


def test_the_wheel_is_typed_and_licensed(names: set[str], wheel: Path) -> None:
    assert "ftcomm/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert headers(wheel)["License-Expression"] == "Apache-2.0"


def test_the_command_is_declared(wheel: Path) -> None:
    assert "ftcomm = ftcomm.cli:main" in metadata(wheel, "entry_points.txt")


def test_requirements_are_few_and_extras_are_complete(wheel: Path) -> None:
    declared = headers(wheel)
    required = {line for line in declared.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {line.partition(">")[0].partition("<")[0] for line in required} == {
        "torch",
        "numpy",
        "msgspec",
        "rich",
        "click",
    }
    assert set(declared.get_all("Provides-Extra", [])) == {
        "bench",
        "peers",
        "cuda12",
        "cuda13",
        "rdma",
        "docs",
        "etcd",
        "hf",
        "secure",
        "plot",
        "chaos",
        "jax",
        "lightning",
        "metrics",
        "otel",
        "ray",
        "stacks",
        "titan",
        "torchft",
        "dev",
    }
    bounds = {line.partition(";")[0] for line in required} | {declared["Requires-Python"]}
    assert not [bound for bound in bounds if "<" in bound], "an upper bound forbids to install what may well work"


def test_a_second_build_has_the_same_bytes(built: dict[str, Path], tmp_path: Path) -> None:
    again = dist(tmp_path / "again")
    assert again.keys() == built.keys() == {".gz", ".whl"}
    for suffix, file in built.items():
        assert (again[suffix].name, again[suffix].read_bytes()) == (file.name, file.read_bytes())


def test_an_index_takes_both(built: dict[str, Path]) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values()), cwd=ROOT)


def test_a_tag_that_is_not_the_version_builds_nothing(tmp_path: Path) -> None:
    """And the one that is, does."""
    clone = tmp_path / "clone"
    run("git", "clone", "-q", "--shared", str(ROOT), str(clone), cwd=tmp_path)
    run("git", "tag", "v9.9", cwd=clone)
    command = [sys.executable, str(clone / ".ci" / "dist.py"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230)
    assert done.returncode == 1
    assert f"this commit has the tag v9.9, and ftcomm.__version__ is {ftcomm.__version__}; make them" in done.stderr
    run("git", "tag", "-d", "v9.9", cwd=clone)
    run("git", "tag", f"v{ftcomm.__version__}", cwd=clone)
    assert f"ftcomm-{ftcomm.__version__}.tar.gz" in run(*command, cwd=tmp_path)


def test_the_readme_can_be_shown_by_itself(wheel: Path) -> None:
    text = headers(wheel).get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    assert not [link for link in links if not link.startswith(("https://", "http://", "#"))]
    assert (
        f"![Four replicas run an all-reduce, one dies, three finish it and go on, the fourth comes back]({URL}/raw/v"
        in text
    )


def test_there_is_one_version(built: dict[str, Path]) -> None:
    assert headers(built[".whl"])["Version"] == ftcomm.__version__
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == ftcomm.__version__


@pytest.mark.parametrize(
    ("version", "said"), [("2.11.0", ""), ("2.15.1+cu130", ""), ("2.16.0a0+git1", "newer"), ("2.9.1", "older")]
)
def test_what_was_not_tested_is_said(version: str, said: str) -> None:
    assert said in untested(version)
    assert bool(untested(version)) == bool(said)


def test_the_unpacked_wheel_imports_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import ftcomm.bench, ftcomm.collective, ftcomm.control, ftcomm.kernels\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] == 'ftcomm'), sep='\\n')"
    )
    files = run(sys.executable, "-c", script, str(tmp_path / "site"), cwd=tmp_path).split()
    assert len(files) >= 5
    assert all(Path(file).is_relative_to(tmp_path / "site") for file in files)


def test_import_is_light(tmp_path: Path) -> None:
    """Nothing that only starts, lists or decides may pay the second and more that torch takes to import."""
    script = "import sys, ftcomm, ftcomm.control, ftcomm.cli; print(*{'torch', 'matplotlib'} & set(sys.modules))"
    assert run(sys.executable, "-c", script, cwd=tmp_path).split() == []


def test_no_named_tuple_has_a_second_base() -> None:
    """Which Python 3.10 refuses, at import."""
    found = []
    for file in files():
        for node in nodes(file):
            if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases) and len(node.bases) > 1:
                found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_every_public_name_is_there_and_every_folder_is_installed(tmp_path: Path) -> None:
    """Names are imported on first use, so a wrong home would show only to the user."""
    script = (
        "import ftcomm; [getattr(ftcomm, name) for name in ftcomm.__all__]\n"
        "import ftcomm.bench, ftcomm.collective, ftcomm.control, ftcomm.kernels"
    )
    run(sys.executable, "-c", script, cwd=tmp_path)


def test_the_settings_list_every_variable_of_the_environment() -> None:
    """And no other. Four are not for people: by two the launcher passes sockets, by one it knows its children, and the
    last tells tests that they are stages of gpu-check."""
    sources = "".join(file.read_text() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    read = set(re.findall(r'"(FTCOMM_[A-Z_]+)"', sources))
    read -= {"FTCOMM_LEADER_FD", "FTCOMM_HOST_AGENT_FD", "FTCOMM_RUN", "FTCOMM_TESTS_NEED_GPU"}
    listed = set(re.findall(r"^\| `(FTCOMM_[A-Z_]+)`", (ROOT / "docs" / "settings.md").read_text(), re.MULTILINE))
    assert listed == read
