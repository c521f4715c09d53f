"""`ftcomm bench page`: docs/performance.md from the JSON results that are kept, and from nothing else.

A section for each kind of result, by its newest file on each processor. What was not measured says by which command it
would be. The page is committed; a test renders it again and compares, so a figure in it cannot drift away from what was
measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from ftcomm.bench.harness import require
from ftcomm.bench.sizes import format_size
from ftcomm.bench.stats import median, percentile
from ftcomm.errors import SettingsError

RESULTS = Path(__file__).parents[1] / "results"
NAME = re.compile(r"(\d{4}-\d\d-\d\d(?:T\d\d)?)-(.+)-cpu\.json")  # a second one of a day says the hour

METHOD = """
# Performance

Made by `ftcomm bench page` from the JSON files in [bench/results](../bench/results); do not edit it by hand. Each
section names its file, which has every figure, the command, the machine and the versions.

**Method.** The speed of a shared machine changes for minutes at a time, by up to four times. So libraries take turns
within each round, a second or less each; figures are compared only within a round, and the result is the median of
these ratios. The time of an op is that of its slowest rank. All results are checked, element by element. The load of
the machine before the run is in the file.

**Limits.** Everything here was measured on CPUs, each time of one machine: shared memory, loopback, and networks of its
kernel; no network between machines and no GPU. With more ranks than cores, ranks share cores. Other libraries ran with
their defaults on these machines, which is not what they were made for. All faults were injected, on a quiet network.

**Answered before.** Two questions were answered once, by the commands `detection` and `profile` of the bench, which
commit 0fc02cc was the last to have. *How soon is a death known where all cores compute?* In 50 runs a SIGKILL came
anywhere in a step. The coordinator had heard of it after 3.8 ms at the median and 20.4 ms at most, and had the new view
on its disk after 7.3 and 28.2 ms ([JSON](../bench/results/2026-11-20-detection-cpu.json)). *Where does the time of an
op go?* At 1 KB with two ranks a sixth of the time is waiting for the other rank, a tenth is the reduction, and the rest
is copies and some 1,000 instructions of the interpreter; at 16 MB more than half is the time in which its bytes can be
copied ([JSON](../bench/results/2026-11-22-profile-cpu.json)).
"""


class Result(NamedTuple):
    file: str
    data: Mapping[str, Any]
    elsewhere: tuple[Result, ...] = ()  # the newest of each other kind of processor

    @property
    def machine(self) -> str:
        header = self.data["header"]
        return (
            f"{header['date'][:10]}, {header['cpu']}, {header['cores']} cores, load {header['load']} before, torch "
            f"{header['torch']}: [{self.file}](../bench/results/{self.file}), by `{_command(header['command'])}`."
        )


Section = Callable[[Result], list[str]]


def load(folder: Path = RESULTS) -> dict[str, Result]:
    """Kind -> its newest result; files of other names are of other pages. Raises `SettingsError` on what is no JSON."""
    found: dict[str, dict[str, Result]] = {}  # kind -> processor -> its newest, the newest of all last
    for path in sorted(folder.glob("*.json")):
        match = NAME.fullmatch(path.name)
        if match is None:
            continue
        try:
            result = Result(path.name, msgspec.json.decode(path.read_bytes()))
        except msgspec.DecodeError as error:
            raise SettingsError(f"{path} is no JSON: {error}; measure it again.") from None
        of_kind, processor = found.setdefault(match[2], {}), result.data.get("header", {}).get("cpu", "")
        of_kind.pop(processor, None)
        of_kind[processor] = result
    newest = {kind: list(reversed(of_kind.values())) for kind, of_kind in found.items()}
    return {kind: first._replace(elsewhere=tuple(others)) for kind, (first, *others) in newest.items()}


def render(results: Mapping[str, Result]) -> str:
    """The page. Pure."""
    lines = METHOD.strip().splitlines()
    for kind, (title, command, section) in SECTIONS.items():
        lines += ["", f"## {title}"]
        if kind not in results:
            lines += ["", f"Not measured yet; `{command}` does."]
            continue
        newest, explained = results[kind], ""
        for result in (newest, *newest.elsewhere):
            text = section(result)
            if text[1:2] == [""]:  # what the columns are; once for all machines
                lines += ["", text[0]] if text[0] != explained else []
                explained, text = text[0], text[2:]
            lines += ["", result.machine, "", *text]
            if result is newest and (picture := _picture(kind, result)):
                lines += ["", f"![{picture.shows}]({_file(kind)})"]
    return "\n".join(lines) + "\n"


def pictures(results: Mapping[str, Result], folder: Path) -> list[Path]:
    """Draw what the page shows, from the same files, as PNG and SVG. Needs matplotlib."""
    drawn = []
    for kind, result in results.items():
        if picture := _picture(kind, result):
            drawn.append(folder / _file(kind))
            picture.draw(result.data, drawn[-1])
    return drawn


def _file(kind: str) -> str:
    return f"performance-{kind}.png"


# -- sections ----------------------------------------------------------------------------------------------------------


def _allreduce(result: Result) -> list[str]:
    rows = [row for row in result.data["rows"] if row.get("in_place", True) and not row.get("error")]
    names = list(dict.fromkeys(_who(row) for row in rows))
    peers = [name for name in names if name != names[0]]
    lines = [
        f"Arrays are float32 and reduced in place, in {max(row['rounds'] for row in rows)} rounds. A peer's column "
        "says how many times as long as ftcomm it takes; the brackets hold the lowest and the highest ratio of a "
        "round, which show the spread of the machine.",
        "",
        *_heading("ranks", "size", "ftcomm p50 (us)", "p99 (us)", "busbw (GB/s)", "of the copy limit", *peers),
    ]
    for ranks, size in dict.fromkeys((row["ranks"], row["bytes"]) for row in rows):
        by = {_who(row): row for row in rows if (row["ranks"], row["bytes"]) == (ranks, size)}
        own = by[names[0]]
        limit = own.get("limit_pct")
        cells = [str(ranks), format_size(size), *(f"{own[name]:.1f}" for name in ("time_us_p50", "time_us_p99"))]
        cells += [f"{own['busbw_gbps']:.2f}", "-" if limit is None else f"{limit:.0f}%"]
        for peer in peers:
            row = by.get(peer)
            ratios = row["round_ratio"] if row else []
            cells.append(f"{row['ratio']:.2f}x ({min(ratios):.2f} to {max(ratios):.2f})" if row and ratios else "-")
        lines.append(_line(*cells))
    return lines


def _recovery(result: Result) -> list[str]:
    request, events = result.data["request"], result.data["events"]
    lines = [
        f"{request['replicas']} replicas run all-reduces of {format_size(request['size'])} back to back, and a fault "
        "hits one replica in the middle of an op. Times are milliseconds after the fault, median and p99: until the "
        "coordinator has heard of it, until it has decided the view without that replica, and until that very op has "
        "returned on all survivors. gloo can only end with an error, and is then restarted as a whole.",
        "",
        *_heading("", "fault", "heard of", "view", "stall", "an op without", "all back", "sent again", "steps lost"),
    ]
    for library, fault in dict.fromkeys((e.get("library", "ftcomm"), e.get("fault", "kill")) for e in events):
        mine = [e for e in events if (e.get("library", "ftcomm"), e.get("fault", "kill")) == (library, fault)]
        times = [_spread(mine, name) for name in ("detect_ms", "view_ms", "stall_ms", "usual_ms", "rejoin_ms")]
        again = [e["bytes_resent"] / 1e6 for e in mine if e.get("bytes_resent") is not None]
        lost = sum(e.get("steps_lost", int(not e["completed"])) for e in mine)
        resent = f"{median(again):.1f} MB" if again else "-"
        lines.append(_line(library, f"{len(mine)} x {fault}", *times, resent, f"{lost} of {len(mine)}"))
    silent = [e for e in events if e.get("heartbeat_ms") and e["stall_ms"] is not None]
    if silent:
        beyond = [e["stall_ms"] - e["heartbeat_ms"] for e in silent]
        again, bound = (max(e[name] for e in silent) / 1e6 for name in ("bytes_resent", "bytes_in_flight"))
        lines += [
            "",
            f"The only sign of this fault is the silence: {silent[0]['heartbeat_ms'] / 1e3:g} s of it at most "
            f"(FTCOMM_HEARTBEAT_TIMEOUT), and a replica is lost. Relative to that limit, the op had returned "
            f"everywhere at {median(beyond):+.0f} ms, p99 {percentile(beyond, 99):+.0f}, the last at "
            f"{max(beyond):+.0f}. Survivors sent {again:.1f} MB again at most, and {bound:.1f} MB can be in flight.",
        ]
    return lines


def _wire(result: Result) -> list[str]:
    request = result.data["request"]
    where = "over loopback"
    if any(row.get("hosts") for row in result.data["rows"]):
        rate, delay = request["rate"] or 0, request["delay"] or 0
        line = [f"{rate / 1e9:g} Gbit/s"] * bool(rate) + [f"{1e3 * delay:g} ms"] * bool(delay)
        where = f"between hosts, each a network namespace, on a line of {', '.join(line) or 'no set rate'}"
    lines = [
        f"TCP {where}. `sockets` are plain sockets that carry the same bytes in the pattern of a ring, but add nothing "
        "and agree on nothing. `of the link` is the time that 2 (n - 1) / n of the array need at the rate of the line, "
        "over the time of the op; n is the number of hosts. Times are medians of rounds in which all took turns; the "
        "brackets hold the fastest and the slowest round.",
        "",
        *_heading("ranks", "hosts", "size", "", "time (ms)", "of sockets", "of the link", "a host sent"),
    ]
    for row in result.data["rows"]:
        rounds = [us / 1e3 for us in row["round_us"]]
        cells = (
            str(row["ranks"]),
            str(row.get("hosts") or "-"),
            format_size(row["bytes"]),
            row["library"],
            f"{row['time_us'] / 1e3:.1f} ({min(rounds):.1f} to {max(rounds):.1f})",
            f"{row['of_sockets']:.0%}",
            f"{row['of_link']:.0%}" if row.get("of_link") else "-",
            f"{row['cable_bytes'] / 1e6:.1f} MB" if row.get("cable_bytes") else "-",
        )
        lines.append(_line(*cells))
    for idle in result.data.get("idle", ()):
        share = f"{idle['cpu_pct']:.2f}% of a core in {idle['seconds']:.0f} s"
        lines += ["", f"While {idle['ranks']} members wait in an op, the busiest of them takes {share}."]
    return lines


def _nixl(result: Result) -> list[str]:
    lines = [
        f"NIXL {result.data['nixl']} runs with UCX's own choice of transports within a host. `puts` is NIXL alone: it "
        "puts what an all-reduce has to send, from an array of that size into one of the neighbour, both ways at once, "
        "in puts as large as a chunk. `large puts` have 8 MB each. `in cache` stays within the first MB of the arrays. "
        "In `one way` only every other rank puts. In `with sum` each rank also adds as many bytes as it puts, as an "
        "all-reduce has to, so no all-reduce can be faster. None of these agree on anything.",
        "",
        *_heading("ranks", "size", "", "time (us)", "GB/s", "of puts"),
    ]
    for row in result.data["rows"]:
        cells = (str(row["ranks"]), format_size(row["bytes"]), row["library"], f"{row['time_us']:.0f}")
        lines.append(_line(*cells, f"{row['rate_gbps']:.2f}", f"{row['of_puts']:.0%}"))
    return lines


def _overhead(result: Result) -> list[str]:
    lines = [
        "The engine is the same in all rows. In `off` its fault tolerance is taken out, and then put back in steps: "
        "`stability` waits until all hold a result, `ftcomm` also watches for silent and slow members, `verify` also "
        "compares results. `over off` is the difference to `off` in the same round.",
        "",
        *_heading("ranks", "size", "level", "p50 (us)", "over off (us)", "over off"),
    ]
    for cost in result.data["costs"]:
        over = ["", ""]
        if cost["over_off_us"] is not None:
            over = [f"{cost['over_off_us']:.2f}", f"{cost['over_off_pct']:.1f}%"]
        cells = (str(cost["ranks"]), format_size(cost["bytes"]), cost["level"], f"{cost['time_us_p50']:.1f}")
        lines.append(_line(*cells, *over))
    return lines


def _fleet(result: Result) -> list[str]:
    data = result.data
    lines = [
        "These are the paper's two figures, computed from its constants by the same simulation as all that follows:",
        "",
    ]
    lines += [*_heading("", "paper", "here", "with failures at random")]
    for check in data["checks"]:
        cells = (f"{check[name]:.1%}" for name in ("found", "at_random"))
        lines.append(_line(check["pipeline"], f"{check['paper']:.0%}", *cells))
    names = list(dict.fromkeys(row["pipeline"] for row in data["rows"]))
    lines += ["", "This is the share of time in which a fleet trains, with failures at random and 95 % intervals:", ""]
    lines += [*_heading("GPUs", *names)]
    for gpus in dict.fromkeys(row["gpus"] for row in data["rows"]):
        shares = [row for row in data["rows"] if row["gpus"] == gpus]
        cells = (f"{row['effective']:.1%} ({row['low']:.1%} to {row['high']:.1%})" for row in shares)
        lines.append(_line(f"{gpus:,}", *cells))
    lines += ["", "These are the constants at the largest size:", "", *_heading("pipeline", "what", "seconds", "from")]
    for pipeline in data["pipelines"]:
        for part in (*pipeline["stall"], *pipeline["away"], *pipeline["rejoin"]):
            lines.append(_line(pipeline["name"], part["name"], f"{part['value']:.3f}", part["source"]))
        if pipeline["stalls"]:
            drawn = f"{min(pipeline['stalls']):.3f} to {max(pipeline['stalls']):.3f}"
            lines.append(_line(pipeline["name"], "from death to the op's return", drawn, "drawn from `bench recovery`"))
            found = f"{pipeline['silent_share']:.0%} of failures are silent"
            lines.append(_line(pipeline["name"], found, f"{pipeline['silence']:.3f}", "the heartbeat timeout"))
    return lines


def _train(result: Result) -> list[str]:
    lines = []
    if result.data["steps"]:
        lines += [
            "These are the times of whole steps of DDP on two ranks; libraries take turns:",
            "",
            *_heading("", "p50 (ms)", "p99 (ms)", "over ftcomm"),
        ]
        for row in result.data["steps"]:
            ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}x"
            lines.append(_line(row["library"], f"{row['step_ms_p50']:.1f}", f"{row['step_ms_p99']:.1f}", ratio))
        lines.append("")
    if result.data["kills"]:
        head = ("", "replicas", "kills", "steps a minute", "under kills", "share", "steps lost", "longest gap (ms)")
        lines += [
            "These are the useful steps, undisturbed and with a SIGKILL at regular intervals:",
            "",
            *_heading(*head),
        ]
        for row in result.data["kills"]:
            rates = (f"{row[name]:.1f}" for name in ("steps_per_minute", "steps_per_minute_killed"))
            cells = (row["library"], str(row["replicas"]), str(row["kills"]), *rates, f"{row['share']:.1%}")
            lines.append(_line(*cells, str(row["lost"]), f"{row['longest_gap_ms']:.0f}"))
    return lines


def _rejoin(result: Result) -> list[str]:
    lines = [
        "A killed replica comes back and fetches its state while the others train. `stall` is the time for which "
        "the training loop of a healthy replica stood still for the copy that it serves, at most.",
        "",
        *_heading("state (MB)", "transfer (s)", "MB/s", "stall (ms)", "of a step", "back after (s)"),
    ]
    for one in result.data["rejoins"]:
        mb, stall = one["nbytes"] / 1e6, max(one["stalls"].values(), default=0.0)
        cells = (f"{mb:.0f}", f"{one['transfer']:.2f}", f"{mb / one['transfer']:.0f}", f"{1e3 * stall:.2f}")
        lines.append(_line(*cells, f"{stall / one['step']:.2%}", f"{one['back']:.1f}"))
    return lines


def _control(result: Result) -> list[str]:
    request, data = result.data["request"], result.data
    rest, rest_of_agents = data.get("messages_per_second"), data.get("agent_messages_per_second")
    agents, above, of_ranks = "", "leader", "leaders"
    if request.get("agents"):
        above, of_ranks = "host agent or leader", "host agents or leaders"
        agents = (
            f" Of the {request['hosts']} hosts of each replica all but that of rank 0 have a host agent, that of a "
            "real job, with a real connection to its leader and from each of its ranks; but many are in a process. A "
            "host is a name, and its agent ends with all its ranks, or with the first of them."
        )
    at_rest = ""
    if rest is not None:  # None with `--rest 0`
        at_rest = f" At rest there are {rest:.0f} messages a second between light ranks and {of_ranks}"
        at_rest += "." if rest_of_agents is None else f", and {rest_of_agents:.0f} between host agents and leaders."
    lines = [
        f"A job of {request['replicas']} replicas of {request['ranks']} ranks on one machine. The coordinator and the "
        "leaders are those of a real job, each in a process of its own; the other ranks are light: production state "
        f"machines with a real connection to their {above} each, many in a process, which move no data.{agents} The "
        "seconds are from a fault until the survivors run in the view without the lost replica, and from its start "
        "until all run in the view that has it again. They hold what the cores of one machine take for all the ranks, "
        f"each of which would have its own.{at_rest}",
        "",
        *_heading("what", "ranks", "decided (s)", "p50 (s)", "p99 (s)", "max (s)"),
    ]
    for loss in data["losses"]:
        seconds = (f"{loss[name]:.2f}" for name in ("decided", "p50", "p99", "max"))
        lines.append(_line(loss["what"], str(loss["survivors"]), *seconds))
    lines += ["", *_heading("what", "part", "CPU (s)", "in (s)", "sent (MB)", "received (MB)", "memory (MB)")]
    for cost in data["costs"]:
        used = (f"{cost['cpu']:.2f}", f"{cost['seconds']:.1f}", f"{cost['sent']:.2f}", f"{cost['received']:.2f}")
        lines.append(_line(cost["what"], cost["part"], *used, f"{cost['memory']:.0f}"))
    return lines


def _views(result: Result) -> list[str]:
    request = result.data["request"]
    lines = [
        f"These are {request['replicas']} replicas of {request['ranks']:,} ranks on {request['hosts']:,} hosts each. "
        "The state machines of the coordinator and of all leaders run in one process, and all their messages are "
        "encoded and decoded; there is no socket and no store, and a rank is only what it answers. So this says what "
        "the protocol costs, and not how long it takes.",
        "",
        *_heading("what", "part", "CPU (s)", "messages in", "MB in", "messages out", "MB out"),
    ]
    for cost in result.data["costs"]:
        came = (f"{cost['received']:,}", f"{cost['received_mb']:.3f}")
        went = (f"{cost['sent']:,}", f"{cost['sent_mb']:.3f}")
        lines.append(_line(cost["what"], cost["part"], f"{cost['cpu']:.3f}", *came, *went))
    return lines


def _process_group(result: Result) -> list[str]:
    request, costs = result.data["request"], result.data["costs"]
    lines = [
        "The time of the processor that an all-reduce takes through `dist.ProcessGroup`, beyond the same call of "
        "ftcomm's own, over a group whose ops are over at once; DDP takes a future of each. A step is forward, "
        f"backward and update of a transformer of width {request['width']} and {request['layers']} layers with one "
        f"thread, and nothing exchanged; DDP calls {costs[0]['ops_per_step']} all-reduces in one.",
        "",
        *_heading("the caller", "own call (us)", "added (us)", "step (ms)", "of a step"),
    ]
    for cost in costs:
        own, added = f"{cost['group_us']:.2f}", f"{cost['added_us']:.2f}"
        lines.append(_line(cost["way"], own, added, f"{cost['step_ms']:.0f}", f"{cost['share_pct']:.3f}%"))
    return lines


def _plugins(result: Result) -> list[str]:
    request, costs = result.data["request"], result.data["costs"]
    lines = [
        f"The time of the processor that a step of a tiny model takes a rank, of {request['ranks']}: by the library "
        "alone, with its own DDP, FSDP2 or collectives over gloo, and with ftcomm's integration, in which each rank is "
        f"a replica, and with FSDP2 all are one. Both take turns, {request['rounds']} rounds of {request['steps']} "
        "steps each. The share is of a step of the transformer of the section above.",
        "",
        *_heading("trainer", "plain (us)", "plug-in (us)", "added (us)", "step (ms)", "of a step"),
    ]
    for cost in costs:
        times = [f"{cost[name]:.0f}" for name in ("plain_us", "plugin_us", "added_us", "step_ms")]
        lines.append(_line(cost["trainer"], *times, f"{cost['share_pct']:.2f}%"))
    return lines


def _first_use(result: Result) -> list[str]:
    rows = result.data["rows"]
    names = ("import_ms", "init_ms", "allreduce_ms", "cpu_ms", "clock_ms", "modules")
    return [
        f"What a rank of a job of NumPy arrays takes until its first all-reduce has returned, in {len(rows)} ranks, "
        "medians with the lowest and the highest: milliseconds of the processor, those by the clock, and the modules "
        "that it has imported besides NumPy.",
        "",
        *_heading("import", "init", "all-reduce", "in all", "by the clock", "modules"),
        _line(
            *(
                f"{median(found):.0f} ({min(found):.0f} to {max(found):.0f})"
                for found in ([row[name] for row in rows] for name in names)
            )
        ),
    ]


def _micro(result: Result) -> list[str]:
    lines = [*_heading("part", "median (us)", "least (us)", "rounds")]
    for one in result.data["benchmarks"]:
        stats = one["stats"]
        cells = (f"{1e6 * stats['median']:.2f}", f"{1e6 * stats['min']:.2f}", str(stats["rounds"]))
        lines.append(_line(one["name"].removeprefix("test_").replace("_", " "), *cells))
    return lines


SECTIONS: dict[str, tuple[str, str, Section]] = {
    "allreduce": ("All-reduce beside its peers", "ftcomm bench allreduce --compare gloo,mpi --ranks 2,4", _allreduce),
    "recovery": ("A replica is lost inside an all-reduce", "ftcomm bench recovery --compare gloo", _recovery),
    "recovery-16m": ("The same, of a smaller array", "ftcomm bench recovery --size 16M", _recovery),
    "recovery-cut": ("A host is cut off inside an all-reduce", "ftcomm bench recovery --faults cut", _recovery),
    "recovery-torchft": ("The same, beside torchft", "ftcomm bench recovery --compare torchft", _recovery),
    "wire": ("All-reduce over TCP beside plain sockets", "ftcomm bench wire", _wire),
    "wire-link": ("The same on a slow line", "ftcomm bench wire --hosts 4 --rate 1gbit --delay 5ms", _wire),
    "wire-shared": ("The same where hosts are shared", "ftcomm bench wire --hosts 2 --ranks-per-host 2", _wire),
    "nixl": ("All-reduce over NIXL beside NIXL alone", "ftcomm bench nixl", _nixl),
    "overhead": ("What fault tolerance costs while nothing fails", "ftcomm bench overhead", _overhead),
    "process-group": ("What the process group of torch adds", "ftcomm bench process-group", _process_group),
    "plug-ins": ("What the integrations of trainers add", "ftcomm bench plug-ins", _plugins),
    "first-use": ("The first all-reduce of a job of NumPy arrays", "ftcomm bench first-use", _first_use),
    "train": ("Steps of a training, and kills", "ftcomm bench train", _train),
    "train-torchft": ("The same, beside torchft", "ftcomm bench train --compare torchft", _train),
    "rejoin": ("A replica comes back", "ftcomm bench rejoin", _rejoin),
    "fleet": ("A simulated fleet of 1,000 to 131,072 GPUs", "ftcomm bench fleet", _fleet),
    "control": ("The control plane of many ranks", "ftcomm bench control", _control),
    "control-agents": ("The same, with host agents", "ftcomm bench control --agents", _control),
    "control-768": ("The same, of more ranks", "ftcomm bench control --replicas 12", _control),
    "control-98304": ("The same, of 98,304 ranks", "ftcomm bench control --replicas 12 --ranks 8192", _control),
    "control-98304-agents": (
        "The same, of 98,304 ranks with host agents",
        "ftcomm bench control --replicas 12 --ranks 8192 --agents",
        _control,
    ),
    "views": ("Changes of view of many ranks", "ftcomm bench views", _views),
    "micro": ("Parts", "make bench-micro", _micro),
}


# -- pictures ----------------------------------------------------------------------------------------------------------


class Picture(NamedTuple):
    """A picture of the sections made by one function: what it shows, of which results it can be drawn, and how."""

    shows: str
    fits: Callable[[Mapping[str, Any]], bool]
    draw: Callable[[Mapping[str, Any], Path], object]


def _draw_allreduce(data: Mapping[str, Any], path: Path) -> None:
    from ftcomm.bench import collective

    collective.draw(msgspec.convert(data["rows"], list[collective.CollectiveRow]), data["header"], path)


def _draw_recovery(data: Mapping[str, Any], path: Path) -> None:
    from ftcomm.bench import recovery

    events = msgspec.convert(data["events"], list[recovery.RecoveryEvent], str_keys=True)
    recovery.draw(events, recovery.RecoveryRequest(**data["request"]), data["header"], path)


def _draw_fleet(data: Mapping[str, Any], path: Path) -> None:
    from ftcomm.bench.research import fleet

    fleet.draw(msgspec.convert(data["rows"], list[fleet.FleetRow]), path)


def _has_places(data: Mapping[str, Any]) -> bool:
    return any("in_place" in row for row in data["rows"])


def _has_stages(data: Mapping[str, Any]) -> bool:
    """Whether a stall has stages, and is more than the silence before it."""
    return any("fault" in e for e in data["events"]) and not any(e.get("heartbeat_ms") for e in data["events"])


PICTURES: dict[Section, Picture] = {
    _allreduce: Picture("Time and bandwidth by size", _has_places, _draw_allreduce),
    _recovery: Picture("What each stall is made of", _has_stages, _draw_recovery),
    _fleet: Picture("Effective time by size and by stall", lambda data: True, _draw_fleet),
}


def _picture(kind: str, result: Result) -> Picture | None:
    """Returns what is drawn of the newest result of a kind, if anything."""
    picture = PICTURES.get(SECTIONS[kind][2]) if kind in SECTIONS else None
    return picture if picture and picture.fits(result.data) else None


def _who(row: Mapping[str, Any]) -> str:
    own = row["library"] in ("ftcomm", "atomic")
    return row["library"] + (f" ({row['transport']})" if own and row["transport"] != "auto" else "")


def _spread(events: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [event[name] for event in events if event.get(name) is not None]
    return _both(values) if values else "-" if name == "view_ms" else "never"


def _both(values: Sequence[float]) -> str:
    """Median and p99."""
    return f"{median(values):.1f}, {percentile(values, 99):.1f}"


def _heading(*names: str) -> list[str]:
    return [_line(*names), "|" + "---|" * len(names)]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _command(command: str) -> str:
    """A command without where its result was written to."""
    return re.sub(r" --(json|csv|plot) \S+", "", command)


# -- the command -------------------------------------------------------------------------------------------------------


@click.command("page")
@click.option(
    "--results",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Of JSON files named DATE-KIND-cpu.json.  [default: the bench's own]",
)
@click.option(
    "--docs",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=Path("docs"),
    show_default=True,
    help="Where performance.md goes.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is not what the results say.")
def page(*, results: Path | None, docs: Path, check: bool) -> None:
    """Make docs/performance.md, and its pictures, from the results that are kept."""
    found = load(results or RESULTS)
    text = render(found)
    path = docs / "performance.md"
    if check:
        if not path.exists() or path.read_text() != text:
            raise SettingsError(f"{path} is not what the results say; make it again with: ftcomm bench page")
        return
    require("matplotlib", "plot")
    path.write_text(text)
    for file in (path, *pictures(found, docs)):
        click.echo(file)
