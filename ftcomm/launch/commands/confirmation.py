"""Names the job and asks the user before a command acts on all of it."""

from __future__ import annotations

import sys

import click

from ftcomm.errors import SettingsError
from ftcomm.launch.admin import protocol

yes_option = click.option("--yes", is_flag=True, help="Do not ask whether this job is meant; for scripts.")


def at_terminal() -> bool:
    return sys.stdin.isatty()


def confirm(seen: protocol.Status, what: str, command: str, *, named: bool, yes: bool) -> None:
    """Name the job, and ask at the terminal whether `what` is meant for it. With `named` (--job) there is nothing to
    ask where there is no terminal. Raises `SettingsError` if it is not meant, or if there is no way to ask."""
    step = max((replica.step for replica in seen.replicas), default=-1)
    at = f", at step {step}" if step >= 0 else ""
    job = f"job {seen.run}: {seen.script}, {len(seen.replicas)} replicas{at}"
    click.echo(job, err=True)
    if yes:
        return
    if at_terminal():
        if not click.confirm(f"{what}?", err=True):
            raise SettingsError("nothing was done.")
    elif not named:
        raise SettingsError(
            f"{what}? There is no terminal to ask at. If it is meant for the {job}, type: {command} --job {seen.run}, "
            "or --yes for the only job that runs here."
        )
