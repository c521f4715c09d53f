"""The picture of `ftcomm bench recovery`: what each stall is made of, and the same faults with its peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftcomm.bench.plots import COLOURS, INK, MUTED, figure
from ftcomm.bench.recovery import Event, Request, summaries
from ftcomm.bench.sizes import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = (
    ("heard of by the coordinator", "#7c2d12"),
    ("new view decided and on disk", "#c2410c"),
    ("survivors in that op again", "#f59e0b"),
    ("the rest of the op", "#d9dee5"),
)


def spans(event: Event) -> list[float]:
    """Milliseconds at which each of PARTS has ended; what is unknown takes no time."""
    ends = [event.detect_ms or 0.0]
    ends.append(max(ends[-1], event.view_ms or 0.0))
    ends.append(ends[-1] + (event.resume_ms or 0.0))
    ends.append(event.stall_ms or 0.0)
    return [min(end, ends[-1]) for end in ends]


def draw(events: Sequence[Event], request: Request, header: Mapping[str, str | int | float], path: Path) -> None:
    """Write `path` in both formats."""
    own = [event for event in events if event.library == "ftcomm" and event.stall_ms is not None]
    faults = list(dict.fromkeys(event.fault for event in own))
    subtitle = (
        f"{request.replicas} replicas on {header['cores']} cores of {header['cpu']}, all-reduces of "
        f"{format_size(request.size)}, {str(header['date'])[:10]}. "
        f"Steps lost by ftcomm: {sum(event.steps_lost for event in events if event.library == 'ftcomm')}."
    )
    rows = max(len(own), 6)
    with figure(path, "A replica is lost inside an all-reduce", subtitle, (12, 1.6 + 0.16 * rows + 1.2)) as drawn:
        grid = drawn.add_gridspec(len(faults) or 1, 2, width_ratios=(1.5, 1))
        for place, fault in enumerate(faults):
            axes = drawn.add_subplot(grid[place, 0])
            _timelines(axes, [event for event in own if event.fault == fault], fault)
            if not place:
                drawn.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
        _compare(drawn.add_subplot(grid[:, 1]), events)


def _timelines(axes: Axes, events: Sequence[Event], fault: str) -> None:
    ordered = sorted(events, key=lambda event: event.stall_ms or 0.0)
    for row, event in enumerate(ordered):
        start = 0.0
        for end, (label, colour) in zip(spans(event), PARTS, strict=True):
            name = label if not row else None
            axes.barh(row, max(end - start, 0.0), left=start, height=0.74, color=colour, label=name)
            start = max(start, end)
    usual = sum(event.usual_ms for event in ordered) / len(ordered)
    axes.axvline(usual, color=INK, linewidth=1, linestyle=":", label="an op without a fault")
    axes.set_title(f"{len(ordered)} x {fault}: milliseconds from the fault to the op's return on all survivors")
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.set_xlim(left=0)


def _compare(axes: Axes, events: Sequence[Event]) -> None:
    found = summaries(events)
    names = []
    for row, one in enumerate(found):
        colour = COLOURS.get(one.library, INK)
        names.append(f"{one.library}\n{one.fault}")
        if one.stall_ms:
            low, high = one.stall_ms["p50"], one.stall_ms["p99"]
            axes.plot([low, high], [row, row], color=colour, linewidth=5, solid_capstyle="round", alpha=0.35)
            axes.plot(low, row, "o", color=colour, markersize=8)
            said = f"{_time(low)}, p99 {_time(high)}" + (f"; {one.steps_lost} steps lost" if one.steps_lost else "")
        else:
            low = one.rejoin_ms.get("p50", 1.0)
            axes.plot(low, row, "X", color=colour, markersize=9)
            said = f"never; all started again {_time(low)}"
        place = {"xytext": (0, 9), "textcoords": "offset points", "ha": "center"}
        axes.annotate(said, (low, row), fontsize=9, color=colour, **place)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.margins(x=0.35)
    axes.grid(axis="y", visible=False)
    axes.set_title("The stall of the survivors: median to p99")
    axes.set_xlabel("milliseconds", color=MUTED)


def _time(ms: float) -> str:
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1e3:.1f} s"
