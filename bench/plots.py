"""One look for all pictures of the bench. Each is written twice: PNG for who reads, SVG for who zooms or prints."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcomm.errors import SettingsError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#22262b", "#5c6570", "#e9ecf0"
OURS = "#c2410c"
COLOURS = {
    "ftcomm": OURS,
    "gloo": "#2f6fb0",
    "mpi": "#3c8d5a",
    "nccl": "#6d4c9f",
    "torchft": "#8a6bb5",
    "restart": "#5c6570",
    "atomic": "#e0a030",
}
FORMATS = (".png", ".svg")

_STYLE: dict[str, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#c9ced6",
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "ftcomm",  # names in the file stay the same from run to run
}


def check_plot(path: Path | None) -> None:
    """Find out before anything is measured. Raises `SettingsError`."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError("--plot needs matplotlib; install it with: pip install 'ftcomm[bench]'")
    if path.suffix not in FORMATS:
        raise SettingsError(f"--plot {path}: expected a name that ends in .png or .svg; both are written.")
    if not path.parent.is_dir():
        raise SettingsError(f"--plot {path}: there is no folder {path.parent}.")


@contextlib.contextmanager
def figure(path: Path, title: str, subtitle: str, size: tuple[float, float]) -> Iterator[Figure]:
    """A figure of `size` inches to draw into, written to `path` and beside it in the other format."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        drawn = Figure(figsize=size, layout="constrained")
        drawn.get_layout_engine().set(rect=(0.005, 0.01, 0.99, 0.99 - 0.62 / size[1]))  # room for the two lines
        drawn.text(0.012, 1 - 0.13 / size[1], title, fontsize=14, weight="bold", va="top")
        drawn.text(0.012, 1 - 0.40 / size[1], subtitle, fontsize=9.5, color=MUTED, va="top")
        yield drawn
        for suffix in FORMATS:
            metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
            drawn.savefig(path.with_suffix(suffix), dpi=150, metadata=metadata)
