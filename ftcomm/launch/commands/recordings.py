"""`ftcomm dump` and `ftcomm trace`: what the ranks of a job on this host have recorded, for people and other tools."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from ftcomm.errors import SettingsError
from ftcomm.recorder import dump as dumps
from ftcomm.recorder.chrome import trace as chrome_trace
from ftcomm.recorder.clocks import offsets
from ftcomm.recorder.files import folders
from ftcomm.recorder.reader import Recording

_SUMMARY = msgspec.json.Decoder(dumps.DumpSummary)


@click.command()
@click.argument("job", metavar="[JOB]", required=False)
def dump(job: str | None) -> None:
    """Write what all ranks of JOB on this host have recorded to a folder, and say where it is.

    JOB is the name of a run, or the beginning of it (ftcomm status); not needed if only one runs here. Ranks need not
    answer, so it works on a job that hangs, and on ranks that are frozen or dead. The folder is for torchfrtrace, and
    for ftcomm trace.
    """
    folder = find(job)
    written = dumps.write(folder, folder.parent.name, "asked")
    summary = _SUMMARY.decode((written / "dump.json").read_bytes())
    for problem in (*summary.unread, *summary.problems):
        click.echo(f"ftcomm: not all can be read: {problem}", err=True)
    click.echo(written)


@click.command()
@click.argument("sources", metavar="[JOB|FOLDER...]", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("ftcomm-trace.json"),
    show_default=True,
    metavar="FILE",
    help="Where to write it.",
)
def trace(sources: tuple[str, ...], output: Path) -> None:
    """Write a trace of all ranks for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

    The ranks are those of a JOB on this host, or of FOLDERs that ftcomm dump has written. Folders of several hosts are
    put on one clock, from the ops that their ranks have done together; how exact that is, is said.
    """
    found: list[Recording] = []
    for source in sources or (None,):
        folder = Path(source) if source is not None and Path(source).exists() else find(source)
        recordings, problems = dumps.recordings_in(folder)
        found += recordings
        for problem in problems:
            click.echo(f"ftcomm: {problem}", err=True)
    for recording in found:
        for problem in recording.problems:
            click.echo(f"ftcomm: {recording.path}: {problem}", err=True)
    try:
        output.write_bytes(msgspec.json.encode(chrome_trace(found)))
    except OSError as error:
        raise SettingsError(f"cannot write {output}: {error.strerror or error}; choose another file with -o") from None
    clocks = list(offsets(found).values())
    ops = sum(len(recording.ops) for recording in found)
    click.echo(f"{output}: {ops} ops of {len(found)} processes; open it in https://ui.perfetto.dev")
    for clock in clocks[1:]:
        click.echo(f"clock of {clock}")


def find(job: str | None) -> Path:
    """Returns the folder of the recordings of a job on this host. Raises `SettingsError` that lists all."""
    jobs = folders()
    if not jobs:
        raise SettingsError("no job of yours has recordings on this host; they are there while it runs")
    matching = [path for run, path in jobs.items() if job is None or run.startswith(job)]
    if len(matching) == 1:
        return matching[0]
    which = "say which job" if job is None else "no job is named so" if not matching else "several jobs are named so"
    raise SettingsError(f"{which}; these have recordings here: {', '.join(jobs)}")
