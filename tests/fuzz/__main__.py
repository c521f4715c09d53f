"""Coverage-guided fuzzing of one target: `python -m tests.fuzz TARGET [--seconds N] [--seed N] [FILE ...]`.

TARGET may be `all`: one after the other, as long each, whatever the others find. With files, runs the target on their
bytes and nothing more: so a failure is looked at again. Needs atheris (in the extra `dev` where it has wheels).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

with contextlib.suppress(ImportError):
    import atheris


@click.command()
@click.argument("name", metavar="TARGET")
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--seconds", default=60.0, show_default=True, help="How long.")
@click.option("--seed", type=int, help="Of the mutations; printed, to run the same again.")
@click.option("--length", default=1024, show_default=True, help="Of an input at most, in bytes.")
def main(name: str, files: tuple[Path, ...], seconds: float, seed: int | None, length: int) -> None:
    logging.getLogger("ftcomm").addHandler(logging.NullHandler())
    logging.getLogger("ftcomm").propagate = False
    if files:
        from tests.fuzz.targets import TARGETS

        for file in files:
            TARGETS[name].run(file.read_bytes())
        return
    if "atheris" not in globals():
        raise click.ClickException("atheris is not installed (it has wheels for Python 3.11 to 3.13 on x86-64 Linux)")
    with atheris.instrument_imports(include=["ftcomm"]):
        from tests.fuzz.choices import KINDS
        from tests.fuzz.targets import TARGETS
    if name not in (*TARGETS, "all"):
        raise click.ClickException(f"no target {name!r}; there are all, {', '.join(TARGETS)}")
    seed = random.randrange(1, 1 << 31) if seed is None else seed
    words = {word for kind in KINDS for word in (kind.__name__, *kind.__struct_fields__)}
    if name != "all":
        fuzz(name, TARGETS[name], words, seconds, seed, length)
    wrong = [one for one in TARGETS if not in_a_fork(fuzz, one, TARGETS[one], words, seconds, seed, length)]
    if wrong:
        raise click.ClickException(f"found something in {', '.join(wrong)}")


def in_a_fork(function: Callable[..., None], *arguments: Any) -> bool:
    """Whether it ends well. What was imported is instrumented once, and `atheris.Fuzz` ends its process."""
    child = os.fork()
    if not child:
        function(*arguments)
    return os.waitpid(child, 0)[1] == 0


def fuzz(name: str, target: Target, words: set[str], seconds: float, seed: int, length: int) -> NoReturn:
    folder = Path(tempfile.mkdtemp(prefix=f"ftcomm-fuzz-{name}-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    for data in target.seeds():
        (corpus / hashlib.sha1(data).hexdigest()).write_bytes(data)
    (folder / "words").write_text("".join(f'"{word}"\n' for word in sorted(words)))
    print(f"target {name}, seed {seed}, corpus and failures in {folder}", flush=True)
    options = {
        "seed": seed,
        "max_len": length,
        "dict": folder / "words",
        "artifact_prefix": f"{folder}/",
        "timeout": 100,  # s for one input; a target that waits gives up before
        "rss_limit_mb": 4096,
        "print_final_stats": 1,
        "verbosity": 0,
    }
    flags = [f"-{option}={setting}" for option, setting in options.items()]
    # Its own limit counts whole seconds, and one too many. Upon this signal it ends well, and tells its statistics. It
    # is heard from the first run on.
    enough = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
    enough.daemon = True

    def run(data: bytes) -> None:
        if enough.ident is None:
            enough.start()
        target.run(data)

    atheris.Setup([sys.argv[0], *flags, str(corpus)], run)
    atheris.Fuzz()
    os._exit(1)  # it does not return


if __name__ == "__main__":
    main()
