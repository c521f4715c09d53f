"""msgspec learns every type while a module is imported, by one thread."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator

from tests.rigs.sources import ROOT, files, name, nodes


def _calls(nodes: Iterable[ast.AST]) -> Iterator[ast.Call]:
    return (found for found in nodes if isinstance(found, ast.Call))


def _name(call: ast.Call) -> str:
    return name(call.func)


def test_no_thread_is_the_first_to_decode_a_struct() -> None:
    """`ftcomm why` asked several ranks at once, and the launcher ended by SIGSEGV, and its job with it."""
    sources = {path: nodes(path) for path in files("ftcomm", "control", "kernels")}
    learned = {
        ast.unparse(kind)
        for found in sources.values()
        for call in _calls(found)
        if _name(call) == "learn"
        for kind in call.args
    }
    wrong = []
    for path, found in sources.items():
        for call in _calls(found):
            kinds = [keyword.value for keyword in call.keywords if keyword.arg == "type"]
            if _name(call) in ("msgspec.json.decode", "msgspec.msgpack.decode"):
                wrong += [(path, call, kind) for kind in kinds if not ast.unparse(kind).startswith("list[tuple[")]
            elif _name(call) == "msgspec.convert":
                kind = ast.unparse(call.args[1])
                if kind not in {*learned, "kind", "DTensorLayout"}:  # etcd's kinds; a tuple of tuples
                    wrong.append((path, call, call.args[1]))
        for function in found:
            if isinstance(function, ast.FunctionDef) and function.name not in ("learn", "__init__"):
                wrong += [
                    (path, call, call.func) for call in _calls(ast.walk(function)) if _name(call).endswith(".Decoder")
                ]
    said = [f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(kind)}" for path, call, kind in wrong]
    assert not said, "give it to a Decoder of the module, or to ftcomm.control.decode.learn"


RACE = """
import sys, threading
import msgspec
from ftcomm.control.decode import learn
sys.setswitchinterval(1e-6)
def made():
    class Inner(msgspec.Struct):
        a: int
    globals()["Inner"] = Inner
    class Outer(msgspec.Struct):
        x: "tuple[Inner, ...]"
        y: "dict[str, int]"
        z: "int"
    return Outer
for turn in range(300):
    kind = made()
    learn(kind)
    gate = threading.Barrier(4)
    def one():
        gate.wait()
        msgspec.json.decode(b'{"x":[{"a":1}],"y":{"k":3},"z":4}', type=kind)
    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("done")
"""


def test_what_was_learned_is_decoded_by_many_threads_at_once() -> None:
    """Without `learn` it ends by SIGSEGV."""
    found = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
