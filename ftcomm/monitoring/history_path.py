"""The path of the history of jobs. Light, since the command line imports it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "FTCOMM_HISTORY"
OFF = "off"


def default_path(env: Mapping[str, str] | None = None) -> Path | None:
    """Returns the file of FTCOMM_HISTORY, or the one in the user's state directory; None if it is `off`."""
    env = os.environ if env is None else env
    if named := env.get(VARIABLE, ""):
        return None if named == OFF else Path(named)
    home = env.get("XDG_STATE_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return Path(home) / "ftcomm" / "history.sqlite"
