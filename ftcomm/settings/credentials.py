"""The credentials of a process of a job: the token, the job's name, and a certificate if it has one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from ftcomm.control.handshake import Credentials
from ftcomm.control.tls import Files, Tls, TlsError
from ftcomm.errors import SettingsError
from ftcomm.settings import Settings, tls_files

LEAST = 16  # characters of a token; a shorter one can be guessed by whoever hears a handshake

log = logging.getLogger("ftcomm")


def of(settings: Settings) -> Credentials:
    """The credentials of a rank. Reads files; raises `SettingsError` if they are of no use."""
    return _make(settings.token, settings.job, settings.tls)


def from_env(token: str, env: Mapping[str, str] | None = None, *, job: str = "") -> Credentials:
    """The credentials of any other process; `job` is the name if its environment says none. Likewise."""
    env = os.environ if env is None else env
    return _make(token, env.get("FTCOMM_JOB") or job, tls_files(env))


def _make(token: str, job: str, files: tuple[str, str, str] | None) -> Credentials:
    if len(token) < LEAST:
        log.warning(
            "ftcomm: a token of %d characters can be guessed; make FTCOMM_TOKEN with: openssl rand -hex 16",
            len(token),
        )
    try:
        return Credentials(token, job, None if files is None else Tls(Files(*files)))
    except (TlsError, ValueError) as error:
        raise SettingsError(f"{error}.") from None
