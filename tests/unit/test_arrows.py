"""Rooms import only those below them. Imports in functions count, and those for type checkers."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from tests.rigs.sources import ROOT, parsed

FOLDERS = {"ftcomm": "ftcomm", "ftcomm.control": "control", "ftcomm.kernels": "kernels", "ftcomm.bench": "bench"}

# From the ground up. A room is a folder, or a module of the root or of `groups`, and imports nothing of its own floor.
FLOORS = (
    "errors",
    "sync kernels",
    "control",
    "process arrays",
    "settings recorder",
    "diagnosis",
    "transport",
    "collective p2p membership",
    "engines",
    "calls compare communicator group_internals static_endpoint",
    "data_plane static_pairs subgroup_internals",
    "static_internals subgroup",
    "group static_group",
    "default_group",
    "groups",  # its __init__
    "monitoring jax",
    "training launch",
    "ftcomm",  # its __init__
    "torch simulation lab doctor dashboard",
    "demo integrations",
    "cli",
    "bench",
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}


@functools.cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for name, folder in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((name, *parts)).removesuffix(".__init__")] = parsed(file)
    return found


def statements(nodes: list[ast.stmt], *, lazy: bool) -> Iterator[ast.stmt]:
    """All of a module that run when it is imported; with `lazy` also those of functions and for type checkers."""
    for node in nodes:
        if not lazy and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        if lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from statements(getattr(node, field, []), lazy=lazy)


def imports(name: str, *, lazy: bool) -> set[str]:
    """The modules of ours that `name` imports."""
    found = set()
    for node in statements(modules()[name].body, lazy=lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in modules() else node.module for part in parts}
    return {each for each in found if each in modules() and each != name}


def room(module: str) -> str:
    _, *parts = *module.split("."), "ftcomm"
    return parts[1] if parts[0] == "groups" and len(parts) > 2 else parts[0]


def test_arrows_point_down() -> None:
    arrows = {(room(name), room(other)) for name in modules() for other in imports(name, lazy=True)}
    assert {room for arrow in arrows for room in arrow} <= FLOOR.keys(), "give the new room a floor"
    wrong = {(a, b) for a, b in arrows if a != b and FLOOR[a] <= FLOOR[b]}
    assert not wrong, "import what lies below, or move what is needed there"


def test_nobody_but_the_registry_knows_which_engines_there_are() -> None:
    """Who asks a group's engine asks the interface (`ftcomm.engines.base`). Bench looks at kernels themselves."""
    inside = re.compile(r"ftcomm\.engines\.gpu")
    knows = {name for name in modules() for other in imports(name, lazy=True) if inside.match(other)}
    assert {name for name in knows if not inside.match(name) and room(name) != "bench"} == {"ftcomm.engines.registry"}


# Rooms that know which transports there are: they try them, measure them, or put virtual time in the place of sockets.
KNOW_TRANSPORTS = {"transport", "settings", "doctor", "simulation", "launch", "lab", "bench", "cli", "demo"}


def test_nobody_but_transport_knows_which_transports_there_are() -> None:
    inside = re.compile(r"ftcomm\.transport\.(nixl|shm|tcp)\b")
    others = {name for name in modules() if room(name) not in KNOW_TRANSPORTS}
    assert not {name for name in others if any(map(inside.match, imports(name, lazy=True)))}
    asks = [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name in others
        for node in ast.walk(modules()[name])
        if isinstance(node, ast.Compare)
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and each.value in ("nixl", "shm", "tcp")
    ]
    assert not asks, "ask `ftcomm.transport` what it can do"


def test_no_modules_import_each_other() -> None:
    state: dict[str, int] = {}

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert state.get(name) != 1, f"a cycle: {' -> '.join((*way, name))}"
        if name not in state:
            state[name] = 1
            for other in sorted(imports(name, lazy=False)):
                visit(other, (*way, name))
            state[name] = 2

    for name in modules():
        visit(name, ())
