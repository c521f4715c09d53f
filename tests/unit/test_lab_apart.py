"""The library never imports the laboratory: what a user imports stays apart from what tests and measures it."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
LABORATORY = ("lab", "simulation", "demo", "bench")
# `ftcomm run --hosts netns` makes its hosts by the laboratory, when it is asked to.
ALLOWED = {
    ("ftcomm/launch/run.py", "ftcomm.lab.netns.network"),
    ("ftcomm/launch/run.py", "ftcomm.lab.netns.slow_network"),
}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {
                f"{node.module}.{name.name}" if node.module == "ftcomm" else str(node.module) for name in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found


def test_no_module_of_the_library_imports_the_laboratory() -> None:
    files = [path for room in ("ftcomm", "control", "kernels") for path in (ROOT / room).rglob("*.py")]
    library = [path for path in files if path.relative_to(ROOT).parts[1] not in LABORATORY]
    assert len(library) > 100
    prefixes = tuple(f"ftcomm.{room}" for room in LABORATORY)
    found = {
        (str(path.relative_to(ROOT)), name) for path in library for name in imports(path) if name.startswith(prefixes)
    }
    assert found == ALLOWED
