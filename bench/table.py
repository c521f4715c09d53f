"""The columns of nccl-tests with a peer beside ftcomm, and those of a recovery, of a detection and of kernels."""

from __future__ import annotations

from collections.abc import Sequence

from ftcomm.bench import detection, kernels
from ftcomm.bench.collective import Row
from ftcomm.bench.recovery import Event, Summary, good

PLACES = ((False, "out of place"), (True, "in place"))


def heading(places: Sequence[bool]) -> list[str]:
    """Columns of nccl-tests, a line for each library; `places`: whether in place, in the order of their columns."""
    left = f"#{'size':>10} {'count':>11} {'type':>9} {'op':>7} {'root':>4} {'ranks':>5} {'library':>14}"
    units = f"#{'(B)':>10} {'(elements)':>11} {'':>43}"
    first = f"#{'':>{len(left) - 1}}"
    for place in places:
        first += f"  {_middle(dict(PLACES)[place], 56)}"
        left += f"  {'p50':>9} {'p99':>9} {'algbw':>7} {'busbw':>7} {'%limit':>6} {'x':>6} {'#wrong':>6}"
        units += f"  {'(us)':>9} {'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>20}"
    return [first, left, units.rstrip()]


def lines(rows: Sequence[Row], places: Sequence[bool]) -> list[str]:
    """The rows of one size and number of ranks: all libraries, in one place or both."""
    found = []
    for who in dict.fromkeys(label(row) for row in rows):
        mine = {row.in_place: row for row in rows if label(row) == who}
        one = next(iter(mine.values()))
        text = f" {one.bytes:>10} {one.count:>11} {one.dtype:>9} {one.redop:>7} {one.root:>4} {one.ranks:>5} {who:>14}"
        for place in places:
            row = mine[place]
            if row.time_us_p50 is None or row.time_us_p99 is None or row.algbw_gbps is None or row.busbw_gbps is None:
                text += f"  {row.error[:56]:<56}"
                continue
            times = f"{_figure(row.time_us_p50):>9} {_figure(row.time_us_p99):>9}"
            rates = f"{row.algbw_gbps:>7.2f} {row.busbw_gbps:>7.2f}"
            limit = "-" if row.limit_pct is None else f"{row.limit_pct:.1f}"
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            text += f"  {times} {rates} {limit:>6} {ratio:>6} {row.wrong:>6}"
        found.append(text.rstrip())
    return found


def label(row: Row) -> str:
    """A library with what distinguishes it from itself."""
    own = row.library in ("ftcomm", "atomic")
    via = f":{row.transport}" if own and row.transport != "auto" else ""
    return f"{row.library}{via}" + (f"/{row.sms}" if row.sms is not None else "") + (f" {row.wire}" if row.wire else "")


def footer(wrong: int) -> str:
    return f"# Wrong elements: {wrong} {'OK' if wrong == 0 else 'FAILED'}"


def event_heading() -> list[str]:
    names = f"#{'library':>9} {'fault':>5} {'no':>4} {'replica':>8} {'in step':>8}"
    times = ("detect", "view", "resume", "stall", "usual op", "rejoin", "resent")
    units = f"#{'':>38}" + _columns(*["(ms)"] * 6, "(MB)")
    return [f"{names}{_columns(*times)} {'lost':>5} {'bytes':>9} {'#wrong':>7}", units]


def event_line(event: Event) -> str:
    times = (event.detect_ms, event.view_ms, event.resume_ms, event.stall_ms, event.usual_ms, event.rejoin_ms)
    resent = None if event.bytes_resent is None else event.bytes_resent / 1e6
    verdict = "-" if event.library != "ftcomm" else "equal" if event.equal else "NOT EQUAL"
    text = f" {event.library:>9} {event.fault:>5} {event.number + 1:>4} {event.victim:>8} {event.step:>8}"
    return f"{text}{_columns(*map(_maybe, (*times, resent)))} {event.steps_lost:>5} {verdict:>9} {event.wrong:>7}"


def summary_lines(summary: Summary) -> list[str]:
    spreads = (summary.detect_ms, summary.view_ms, summary.resume_ms, summary.stall_ms, summary.usual_ms)
    spreads += (summary.rejoin_ms, {name: value / 1e6 for name, value in summary.bytes_resent.items()})
    lines = [
        f"#{summary.library:>9} {summary.fault:>5} {name:>4} {'':>17}"
        + _columns(*(_maybe(s.get(name)) for s in spreads))
        for name in ("p50", "p99", "max")
    ]
    said = [f"ops that survived: {summary.completed} of {summary.kills}"]
    if summary.library == "ftcomm":
        said += [
            f"equal bytes on all survivors: {summary.equal} of {summary.kills}",
            f"wrong elements: {summary.wrong}",
            f"steps lost: {summary.steps_lost}",
            f"sent again more than was in flight: {summary.over_bound} {'OK' if good(summary) else 'FAILED'}",
        ]
        if over := summary.over_heartbeat_ms:
            lines.append(
                f"# stall beyond the heartbeat timeout: p50 {over['p50']:.0f} ms, p99 {over['p99']:.0f} ms, max "
                f"{over['max']:.0f} ms"
            )
    else:
        said.append(f"steps lost: {summary.steps_lost}")
    return [*lines, f"# {summary.library}, {summary.fault}: {'; '.join(said)}"]


def detection_heading() -> list[str]:
    names = f"#{'kill':>5} {'replica':>8} {'rank':>5}" + _columns("detect", "view")
    return [f"{names}   how", f"#{'':>20}" + _columns("(ms)", "(ms)")]


def detection_line(event: detection.Event) -> str:
    times = _columns(_maybe(event.detect_ms), _maybe(event.view_ms))
    return f" {event.number + 1:>5} {event.replica:>8} {event.rank:>5}{times}   {event.how}"


def detection_summary(summary: detection.Summary) -> list[str]:
    lines = [
        f"#{name:>5} {'':>14}" + _columns(_maybe(summary.detect_ms.get(name)), _maybe(summary.view_ms.get(name)))
        for name in ("p50", "p90", "p99", "max")
    ]
    return [*lines, f"# detected: {summary.detected} of {summary.kills}"]


def kernel_heading() -> list[str]:
    names = f"#{'kernel':>16} {'dtype':>8} {'kind':>5} {'srcs':>4} {'size':>11} {'sms':>4} {'blocks':>6} {'regs':>4}"
    names += _columns("p50", "p20", "p80", "GB/s") + f" {'% copy':>7} {'% same':>7} {'#wrong':>7}  device"
    units = f"#{'':>42} {'(B)':>5} {'':>16}" + _columns("(us)", "(us)", "(us)", "") + f" {'':>7} {'blocks':>7}"
    return [names, units]


def kernel_line(row: kernels.Row) -> str:
    """A dash for what would be a speed and is none."""
    rates = [f"{100 * rate:.1f}" if rate is not None else "-" for rate in (row.of_best_copy, row.of_same_blocks)]
    text = f" {row.kernel:>16} {row.dtype:>8} {row.kind or '':>5} {row.sources:>4} {row.bytes:>11}"
    text += f" {row.sms or 'all':>4} {row.blocks or '-':>6} {row.registers or '-':>4}"
    text += _columns(*map(_figure, (row.time_us_p50, row.time_us_p20, row.time_us_p80)))
    text += _columns("-" if row.gbps is None else _figure(row.gbps))
    return f"{text} {rates[0]:>7} {rates[1]:>7} {row.wrong:>7}  {row.device} {row.l2}".rstrip()


def _columns(*texts: str) -> str:
    return "".join(f" {text:>10}" for text in texts)


def _maybe(value: float | None) -> str:
    return "never" if value is None else _figure(value)


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _middle(text: str, width: int) -> str:
    return f" {text} ".center(width, "-")
