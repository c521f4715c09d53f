"""What the documents name is there: files, names in modules, commands and options, variables, targets of make."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import ftcomm
from ftcomm.cli import commands
from ftcomm.simulation import mutations
from tests.rigs.sources import nodes
from tests.simulation import test_mutations

pytestmark = pytest.mark.protocol

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = {"ftcomm.control": "control", "ftcomm.kernels": "kernels", "ftcomm.bench": "bench", "ftcomm": "ftcomm"}
NOT_OURS = {"train.py", "sums.py", "model.safetensors"}  # files of the reader's
OF_TORCH = {"Work"}  # a class of ours, too

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@functools.cache
def files() -> tuple[str, ...]:
    """All files of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).exists())


def code(page: Path) -> Iterator[str]:
    """What stands in code spans, and the lines of blocks."""
    text = page.read_text()
    for block in re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.replace("\\\n", " ").splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(), re.MULTILINE)
            assert anchor in map(slug, headings), target


@pages
def test_files_are_there(page: Path) -> None:
    names = {os.path.basename(name) for name in files()}
    for span in code(page):
        for path in re.findall(r"(?<![\w./*-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|svg|png|json|txt|yaml|sbatch|sh)\b", span):
            if "/" in path and not any(name == path or name.endswith("/" + path) for name in files()):
                pytest.fail(f"{path} is not in the repository")
            known = path in names or path in NOT_OURS or not path.endswith(".py")
            assert "/" in path or known, f"no file is called {path}"


@pages
def test_folders_are_there(page: Path) -> None:
    for span in code(page):
        for folder in re.findall(r"^((?:ftcomm|control|kernels|bench|tests|docs|examples)/[\w/]*)/?$", span):
            assert (ROOT / folder).exists(), folder


def home(name: str) -> tuple[Path, list[str]] | None:
    """The module or package that the dotted name begins with, and what is left of the name."""
    for package, folder in PACKAGES.items():
        if name == package or name.startswith(package + "."):
            parts = name[len(package) + 1 :].split(".") if name != package else []
            here = ROOT / folder
            while parts and (here / parts[0]).is_dir():
                here /= parts.pop(0)
            if parts and (here / f"{parts[0]}.py").exists():
                return here / f"{parts.pop(0)}.py", parts
            return here / "__init__.py", parts
    return None


@functools.cache
def names_in(module: Path) -> frozenset[str]:
    """All that a module defines or imports, in classes, too, and the names that it imports on first use."""
    found: set[str] = set()
    for node in nodes(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return frozenset(found)


@pages
def test_names_are_there(page: Path) -> None:
    for span in code(page):
        for name in re.findall(r"(?<![\w./-])ftcomm(?:\.[A-Za-z_]\w*)+", span):
            if name.endswith((".md", ".py")):
                continue
            found = home(name)
            assert found is not None
            module, rest = found
            assert module.exists(), name
            assert not rest or rest[0] in names_in(module), f"{name}: {module.relative_to(ROOT)} has no {rest[0]}"


@functools.cache
def classes() -> dict[str, Path]:
    """The classes of ours, and the file of each; to parse them all takes seconds."""
    found = {}
    for module in (file for file in map(Path, files()) if file.suffix == ".py" and file.parts[0] in PACKAGES.values()):
        for kind in re.findall(r"^\s*class (\w+)", (ROOT / module).read_text(), re.MULTILINE):
            found[kind] = ROOT / module
    return found


@functools.cache
def definition(kind: str) -> tuple[list[str], frozenset[str]]:
    """The names of the bases of a class, and what it defines."""
    node = next(each for each in nodes(classes()[kind]) if isinstance(each, ast.ClassDef) and each.name == kind)
    inner = (each for statement in node.body for each in ast.walk(statement))
    return [ast.unparse(base).split(".")[-1] for base in node.bases], own_names(inner)


def own_names(inner: Iterator[ast.AST]) -> frozenset[str]:
    """The methods and attributes in the body of a class."""
    names = set()
    for node in inner:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return frozenset(names)


def has(kind: str, name: str) -> bool:
    """Whether `kind` or a base of it defines `name`, as far as its bases are ours."""
    bases, own = definition(kind)
    return name in own or any(has(base, name) for base in bases if base in classes())


@pages
def test_methods_are_there(page: Path) -> None:
    for span in code(page):
        for kind, name in re.findall(r"(?<![\w.])([A-Z]\w+)\.([a-z_]\w*)", span):
            if kind in classes() and kind not in OF_TORCH and not has(kind, name):
                pytest.fail(f"{kind} has no {name}")


@functools.cache
def parameters(call: str) -> frozenset[str] | None:
    """Of the collective of that name, at module level or on a group."""
    function = getattr(ftcomm, call, None) if call in ftcomm.__all__ else getattr(ftcomm.Group, call, None)
    return frozenset(inspect.signature(function).parameters) if inspect.isfunction(function) else None


@pages
def test_calls_and_their_arguments_are_there(page: Path) -> None:
    for span in code(page):
        for name in re.findall(r"(?<![.\w])(?:Group|group)\.(\w+)", span):
            assert hasattr(ftcomm.Group, name) or has("Group", name), f"Group.{name}"
        try:
            parsed = ast.parse(span.strip().removeprefix("work = "))
        except SyntaxError:
            continue
        for call in (node for node in ast.walk(parsed) if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            taken = parameters(name) if name else None
            unknown = {word.arg for word in call.keywords if word.arg} - (taken or set())
            ours = taken is not None and not ast.unparse(call.func).startswith(("dist.", "torch."))
            assert not ours or not unknown, f"{span}: {name} takes no {unknown}"


@pages
def test_commands_and_options_are_there(page: Path) -> None:
    for line in code(page):
        line = line.split("  #")[0].rstrip()
        for call in re.findall(r"^(?:\.venv/bin/|srun \.\.\. )?ftcomm (?!\w+ [A-Z][a-z])([a-z].*)$", line):
            command: click.Command | None = commands
            words = call.split()
            while words and isinstance(command, click.Group):
                name = words.pop(0)
                command = command.get_command(click.Context(command), name)
                assert command is not None, f"ftcomm {call}: there is no {name}"
            assert command is not None
            options = {
                option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
            }
            script = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
            for word in words[:script]:
                option = word.partition("=")[0].rstrip("`),.;:")
                assert not option.startswith("--") or option in {*options, "--help"}, f"ftcomm {call}: no {option}"


@pages
def test_targets_of_make_are_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code(page):
        for call in re.findall(r"^make ([a-z -]+)", line):
            assert set(call.split()) <= targets, line


@pages
def test_modules_that_are_run_are_there(page: Path) -> None:
    for line in code(page):
        for module in re.findall(r"-m ((?:tests|ftcomm)[\w.]*)", line):
            if module.startswith("tests"):
                path = ROOT / module.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@functools.cache
def variables() -> frozenset[str]:
    return frozenset(
        name
        for file in files()
        if file.endswith(".py") and file != "tests/unit/test_documents.py"
        for name in re.findall(r'"(FTCOMM_[A-Z_]*[A-Z])', (ROOT / file).read_text())
    )


@pages
def test_variables_are_there(page: Path) -> None:
    unknown = set(re.findall(r"FTCOMM_[A-Z_]*[A-Z]", page.read_text())) - variables()
    assert not unknown


def test_what_the_readme_counts() -> None:
    said = (ROOT / "README.md").read_text()
    histories = list((ROOT / "tests" / "simulation" / "transcripts").glob("*.txt"))
    counts = len(mutations.MUTATIONS), len(test_mutations.MUTATIONS), len(histories)
    wanted = "{} rules in this check, and with {} in the simulation. {} histories".format(*counts)
    assert wanted in " ".join(said.split())
