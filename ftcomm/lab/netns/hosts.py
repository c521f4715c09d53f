"""The hosts of `ftcomm run --hosts netns`: where each replica is, and how fast the network between them."""

from __future__ import annotations

import dataclasses
import re

from ftcomm.errors import SettingsError
from ftcomm.launch.hosts import HostNetwork


@dataclasses.dataclass(frozen=True)
class NamespaceHosts:
    """Network namespaces as hosts, filled in the order of the replicas' numbers. With a rate or a delay a process of
    ours carries the packets, see `slow_network`."""

    replicas_per_host: int = 1
    rate: float | None = None  # bits a second between them; None: as fast as the kernel can
    delay: float = 0.0  # s for a packet from one to another

    def check(self, replicas: int) -> None:
        """Raise `SettingsError` if so many replicas cannot be placed."""
        if not 1 <= self.replicas_per_host <= replicas:
            raise SettingsError(
                f"replicas_per_host {self.replicas_per_host}: expected 1 to {replicas}, the number of replicas."
            )

    def place(self, replica: int) -> int:
        """Returns the number of the host on which a replica runs."""
        return replica // self.replicas_per_host

    def open(self, replicas: int) -> HostNetwork:
        """Make the hosts. Raises `SettingsError` if this user or kernel cannot do it."""
        hosts = self.place(replicas - 1) + 1
        if self.rate is None and not self.delay:
            from ftcomm.lab.netns.network import LabNetwork

            return LabNetwork(hosts)
        from ftcomm.lab.netns.slow_network import SlowNetwork

        return SlowNetwork(hosts, rate=self.rate, delay=self.delay)


def hosts_named(kind: str, rate: float | None, delay: float) -> NamespaceHosts | None:
    """Returns what `--hosts KIND --rate RATE --delay TIME` ask for. Raises `SettingsError`."""
    if kind == "netns":
        return NamespaceHosts(rate=rate, delay=delay)
    if rate is not None or delay:
        raise SettingsError("--rate and --delay are of a network between hosts; add --hosts netns.")
    return None


_RATE = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # as tc has them
_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str) -> float:
    """Returns the bits a second of "1gbit". Raises `SettingsError`."""
    return _parse(text, _RATE, "a rate", "1gbit")


def parse_delay(text: str) -> float:
    """Returns the seconds of "5ms". Raises `SettingsError`."""
    return _parse(text, _TIME, "a time", "5ms")


def _parse(text: str, units: dict[str, float], what: str, example: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:[.][0-9]+)?)([a-z]+)", text.strip().lower())
    if match is None or match[2] not in units or not float(match[1]):
        raise SettingsError(
            f"{text!r} is not {what} in {', '.join(units)}; expected a number with one of these, as {example}."
        )
    return float(match[1]) * units[match[2]]
