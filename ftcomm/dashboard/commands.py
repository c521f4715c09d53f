"""`ftcomm dashboard`: serve a running job as a page, with its metrics."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from pathlib import Path

import click

from ftcomm.dashboard.access import TOKENS
from ftcomm.dashboard.feed import Feed
from ftcomm.dashboard.metrics import OtelExport
from ftcomm.dashboard.server import DashboardServer
from ftcomm.errors import SettingsError
from ftcomm.launch.admin.client import find
from ftcomm.launch.commands.job import job_option
from ftcomm.launch.listen import LOOPBACK

TOKEN = "FTCOMM_DASHBOARD_TOKEN"
OTLP_EVERY = 15.0  # s
ENDING = 2.0  # s in which readers are told of the end


@click.command()
@job_option
@click.option("--host", default=LOOPBACK, show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default="any free one", help="Port to listen on."
)
@click.option("--otlp", metavar="URL", help="Also send the metrics there, as http://localhost:4318/v1/metrics.")
def dashboard(job: str | None, host: str, port: int, otlp: str | None) -> None:
    """Serve the live view of a running job, until the job ends or Ctrl-C.

    The page shows every replica and rank, throughput, what happened, and what it cost; `?` on it lists the keys.
    /metrics is for Prometheus.

    The address is printed with the token that it wants. The token is made anew each time, or is FTCOMM_DASHBOARD_TOKEN;
    then it is not printed. The view is unencrypted; from elsewhere look through ssh -L PORT:localhost:PORT.
    """
    serve(find(job), host, port, otlp)


def serve(socket: Path, host: str, port: int, otlp: str | None = None) -> None:
    """Serve the job whose admin socket that is; blocks until it ends. Raises `SettingsError`, `JobEnded`."""
    chosen = os.environ.get(TOKEN, "")
    if chosen and not TOKENS.fullmatch(chosen):
        raise SettingsError(
            f"{TOKEN} has {len(chosen)} characters; expected 16 or more, of A-Z a-z 0-9 and _ . ~ + / = - alone "
            "(openssl rand -hex 16)."
        )
    feed = Feed(socket)
    try:
        server = DashboardServer(feed, host, port, chosen or secrets.token_urlsafe(16))
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another.") from None
    export = None if otlp is None else OtelExport(otlp, lambda: feed.overview, OTLP_EVERY)
    token = "" if chosen else f"?token={server.access.token}"
    print(f"live view: {server.url}{token}" + (f" (its token is in {TOKEN})" if chosen else ""), flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=server.serve_forever, name="ftcomm-http", daemon=True).start()
    try:
        while not feed.ended.wait(1.0):
            pass
        print("the job has ended, and with it its live view", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        feed.close(ENDING)
        server.shutdown()
        if export is not None:
            export.close()
