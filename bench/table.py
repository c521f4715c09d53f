"""The columns of nccl-tests with a peer beside ftcomm, and those of a recovery, of a detection and of kernels."""

from __future__ import annotations

from collections.abc import Sequence

from ftcomm.bench import detection, kernels
from ftcomm.bench.allreduce import Row
from ftcomm.bench.recovery import Event, Summary


def heading(peers: Sequence[str]) -> list[str]:
    first = f"#{'':>47} {_middle('ftcomm', 43)}"
    second = f"#{'size':>10} {'count':>11} {'type':>9} {'op':>8} {'ranks':>5}" + _columns(
        "p50", "p99", "algbw", "busbw"
    )
    units = f"#{'(B)':>10} {'(elements)':>11} {'':>24}" + _columns("(us)", "(us)", "(GB/s)", "(GB/s)")
    for peer in peers:
        first += f"   {_middle(peer, 32)}   {_middle(f'{peer} / ftcomm', 21)}"
        second += f"  {_columns('p50', 'p99', 'busbw')}   {'ratio':>7} {'over rounds':>13}"
        units += f"  {_columns('(us)', '(us)', '(GB/s)')}   {'':>21}"
    return [first, f"{second} {'#wrong':>8}", units.rstrip()]


def line(rows: Sequence[Row]) -> str:
    """The rows of one size, ftcomm first."""
    own = rows[0]
    text = f" {own.bytes:>10} {own.count:>11} {own.dtype:>9} {own.redop:>8} {own.ranks:>5}"
    text += _columns(*map(_figure, (own.time_us_p50, own.time_us_p99, own.algbw_gbps, own.busbw_gbps)))
    for peer in rows[1:]:
        spread = f"{min(peer.round_ratio):.1f}-{max(peer.round_ratio):.1f}"
        text += f"  {_columns(*map(_figure, (peer.time_us_p50, peer.time_us_p99, peer.busbw_gbps)))}"
        text += f"   {f'{peer.ratio:.1f}x':>7} {spread:>13}"
    return f"{text} {sum(row.wrong for row in rows):>8}"


def footer(wrong: int) -> str:
    return f"# Wrong elements: {wrong} {'OK' if wrong == 0 else 'FAILED'}"


def event_heading() -> list[str]:
    names = f"#{'kill':>5} {'replica':>8} {'in step':>8}" + _columns("detect", "stall", "usual op", "rejoin")
    return [f"{names} {'bytes':>9} {'#wrong':>7}", f"#{'':>23}" + _columns("(ms)", "(ms)", "(ms)", "(ms)")]


def event_line(event: Event) -> str:
    times = _columns(*map(_maybe, (event.detect_ms, event.stall_ms, event.usual_ms, event.rejoin_ms)))
    verdict = "equal" if event.equal else "NOT EQUAL"
    return f" {event.number + 1:>5} {event.victim:>8} {event.step:>8}{times} {verdict:>9} {event.wrong:>7}"


def summary_lines(summary: Summary) -> list[str]:
    lines = []
    for name in ("p50", "p99", "max"):
        spreads = (summary.detect_ms, summary.stall_ms, summary.usual_ms, summary.rejoin_ms)
        lines.append(f"#{name:>5} {'':>17}" + _columns(*(_maybe(spread.get(name)) for spread in spreads)))
    good = summary.completed == summary.equal == summary.kills and summary.wrong == 0
    said = (
        f"ops that survived: {summary.completed} of {summary.kills}",
        f"equal bytes on all survivors: {summary.equal} of {summary.kills}",
        f"wrong elements: {summary.wrong}",
        f"steps lost: {summary.steps_lost} {'OK' if good else 'FAILED'}",
    )
    return [*lines, f"# {'; '.join(said)}"]


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
