"""Checks what the transport by NIXL needs (the library, UCX's devices, RDMA, locked memory), and how fast a put is."""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

from ftcomm.doctor.check import Finding, Grade
from ftcomm.errors import TransportError
from ftcomm.transport.nixl import library as nixl_library
from ftcomm.transport.nixl.context import rails
from ftcomm.transport.nixl.memory import address_of
from ftcomm.transport.nixl.network import MEND, choose, listeners, rdma_devices
from ftcomm.transport.segment import CHUNK, SIZE

LOCKED = 512 << 20  # bytes: staging and mirrors of a dozen members, arrays that are reduced, and what UCX takes
_PUTS, _PUTS_TIMEOUT = 64, 10.0
_LOOPBACK = ("lo", "docker", "br-", "veth", "virbr", "cni", "flannel")


def library() -> list[Finding]:
    """NIXL is there, starts, and carries bytes from this process to itself."""
    try:
        library = nixl_library.load()
    except nixl_library.NixlMissing as error:
        verdict: Grade = "wrong" if wanted(os.environ) or rdma_devices() else "note"
        return [
            Finding(
                "nixl",
                verdict,
                f"{str(error).partition('. ')[0]}; ranks of other hosts are reached by TCP",
                nixl_library.MEND,
            )
        ]
    begun = time.monotonic()
    network = choose(os.environ, bool(rdma_devices()))
    devices = rails(os.environ.get("FTCOMM_NIXL_DEVICES", ""))[0]
    before = listeners()
    try:
        agents = [library.agent(f"doctor.{i}", devices, network) for i in range(2)]
        took = time.monotonic() - begun
        rate = _put(library, agents)
    except (TransportError, OSError) as error:
        return [
            Finding(
                "nixl",
                "wrong",
                str(error),
                "Unset UCX_TLS and UCX_NET_DEVICES, or let them name what "
                "`ftcomm doctor` lists without them; FTCOMM_TRANSPORT=tcp does without NIXL.",
            )
        ]
    paths, troubles = library.said()
    ways = {
        f"{path.where}: {path} ({nixl_library.speed(path) or 'link speed unknown'})"
        for path in paths
        if path.where != "self"
    }
    findings = [
        Finding(
            "nixl", "ok", f"NIXL {library.version} ({library.name}), UCX {library.ucx}, starts in {took / 2:.2f} s"
        ),
        Finding("ucx", "ok", "; ".join(sorted(ways)) or "UCX_LOG_LEVEL or UCX_LOG_FILE is set: its log tells the way"),
        Finding("put", "ok", f"{rate / 1e9:.2f} GB/s from this process to itself, in puts of {CHUNK >> 10} KB"),
    ]
    opened = ", ".join(sorted(listeners() - before))
    if opened:
        said = f"UCX listens at {opened}: whoever reaches that can write the memory of a rank, without a token"
        findings.append(Finding("ports", "note", said, MEND))
    else:
        findings.append(Finding("ports", "ok", f"UCX listens nowhere; it may use {network.name}"))
    return findings + [Finding("ucx", "note", f"UCX says: {trouble}") for trouble in troubles]


def _put(library: nixl_library.NixlLibrary, agents: list[object]) -> float:
    """Bytes a second. Raises `TransportError` if nothing gets through."""
    near, far = mmap.mmap(-1, CHUNK), mmap.mmap(-1, CHUNK)
    near.write(b"x" * CHUNK)
    writer, reader = agents
    try:
        mine = writer.register_memory([(address_of(near), CHUNK, 0, "")], "DRAM")  # type: ignore[attr-defined]
        theirs = reader.register_memory([(address_of(far), CHUNK, 0, "")], "DRAM")  # type: ignore[attr-defined]
        name = writer.add_remote_agent(reader.get_agent_metadata())  # type: ignore[attr-defined]
        handle = writer.initialize_xfer("WRITE", mine.trim(), theirs.trim(), name, b"")  # type: ignore[attr-defined]
        end = time.monotonic() + _PUTS_TIMEOUT
        for number in range(_PUTS + 1):
            if number == 1:
                begun = time.monotonic()  # the first connects
            state = writer.transfer(handle)  # type: ignore[attr-defined]
            while state == "PROC":
                reader.get_new_notifs()  # type: ignore[attr-defined]
                state = writer.check_xfer_state(handle)  # type: ignore[attr-defined]
                if time.monotonic() > end:
                    raise TransportError(f"a put of {CHUNK} bytes to oneself has not ended within {_PUTS_TIMEOUT:g} s")
        took = time.monotonic() - begun
    except library.errors as error:
        raise TransportError(f"NIXL cannot put to oneself: {nixl_library.describe(error)}") from error
    if far[:] != near[:]:
        raise TransportError("a put to oneself has ended, and the bytes are not there")
    return _PUTS * CHUNK / took


def devices(root: Path = Path("/sys/class/infiniband")) -> list[Finding]:
    """The devices for RDMA, and whether their ports are up."""
    there = sorted(path.name for path in root.glob("*")) if root.is_dir() else []
    if not there:
        return [
            Finding(
                "rdma",
                "note",
                f"no device for RDMA ({root} is empty); NIXL goes by the memory of this host alone, and "
                "ftcomm's own TCP is used with FTCOMM_TRANSPORT=auto",
            )
        ]
    up = rdma_devices(root)
    findings = [
        Finding("rdma", "ok", f"{name} is up, {nixl_library.link_rate(name, root.parent) or 'rate unknown'}")
        for name in up
    ]
    for name in sorted(set(there) - set(up)):
        states = [path.read_text().strip() for path in sorted((root / name / "ports").glob("*/state"))]
        findings.append(
            Finding(
                "rdma",
                "note" if up else "wrong",
                f"{name} has no port that is up: {', '.join(states) or 'none'}",
                f"Look at its cable and at `ip link`, `rdma link`; {name} is not used until it is ACTIVE.",
            )
        )
    return findings


def locked_memory(limit: int | None = None, rdma: bool | None = None) -> list[Finding]:
    """RDMA locks the memory that it reads and writes. `limit` in bytes."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    rdma = bool(rdma_devices()) if rdma is None else rdma
    enough = limit == resource.RLIM_INFINITY or limit >= LOCKED
    said = "no limit" if limit == resource.RLIM_INFINITY else f"{limit >> 10} KB"
    if enough:
        return [Finding("locked memory", "ok", f"ulimit -l: {said}")]
    return [
        Finding(
            "locked memory",
            "wrong" if rdma else "note",
            f"ulimit -l: {said}; RDMA wants {LOCKED >> 10} KB or more ({SIZE >> 20} MB for each member, and arrays)"
            + ("" if rdma else ", which is not there"),
            "Set `ulimit -l unlimited` for the ranks: `* - memlock unlimited` in /etc/security/limits.conf, "
            "LimitMEMLOCK=infinity for slurmd, `--ulimit memlock=-1` for docker.",
        )
    ]


def interface(env: Mapping[str, str] | None = None, root: Path = Path("/sys/class")) -> list[Finding]:
    """Checks that the devices in UCX_NET_DEVICES and FTCOMM_NIXL_DEVICES exist, and lead out of this host if needed."""
    env = os.environ if env is None else env
    findings = []
    for variable in ("UCX_NET_DEVICES", "FTCOMM_NIXL_DEVICES"):
        named = [name for part in rails(env.get(variable, "")) for name in part.split(",") if name and name != "all"]
        for name in named:
            device = name.partition(":")[0]
            if not any((root / kind / device).exists() for kind in ("infiniband", "net")):
                there = sorted(path.name for kind in ("infiniband", "net") for path in (root / kind).glob("*"))
                findings.append(
                    Finding(
                        variable,
                        "wrong",
                        f"names {name}, and there are {', '.join(there)}",
                        f"Set {variable} to one or several of these, or unset it.",
                    )
                )
            elif device.startswith(_LOOPBACK) and not _local(env):
                findings.append(
                    Finding(
                        variable,
                        "wrong",
                        f"names {name}, which no other host can reach, and FTCOMM_HOST is {env['FTCOMM_HOST']}",
                        f"Set {variable} to the interface of that network, or unset it.",
                    )
                )
            else:
                findings.append(
                    Finding(variable, "ok", f"{name}, {nixl_library.link_rate(device, root) or 'rate unknown'}")
                )
    return findings


def _local(env: Mapping[str, str]) -> bool:
    host = env.get("FTCOMM_HOST", "")
    return not host or host.startswith(("127.", "lo", "::1"))


def gpu_direct() -> list[Finding]:
    """Whether RDMA devices can read the memory of GPUs."""
    root = Path("/sys/module")
    if not (root / "nvidia").is_dir():
        return []
    if (root / "nvidia_peermem").is_dir():
        return [Finding("gpudirect", "ok", "nvidia_peermem is loaded")]
    return [
        Finding(
            "gpudirect",
            "note",
            "nvidia_peermem is not loaded; newer drivers use dma-buf, else bytes of a GPU go through host memory",
            "modprobe nvidia-peermem",
        )
    ]


def wanted(env: Mapping[str, str]) -> bool:
    return env.get("FTCOMM_TRANSPORT") == "nixl"
