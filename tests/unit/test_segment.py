from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from ftcomm.control.limits import KERNEL_MEMBERS, MEMBERS
from ftcomm.errors import TransportError
from ftcomm.kernels.device.words import MOST_MEMBERS
from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.segment import (
    CHUNK,
    HOP,
    HOST,
    LEAST,
    MIRRORS,
    NEAR,
    POSTED,
    REDUCED,
    SIZE,
    SLOTS,
    STAGGER,
    Layout,
    OtherEngine,
    Segment,
    level,
    levels,
    mutex,
    published,
    sized,
    slot_payload,
    wrong,
)
from ftcomm.transport.shm import ShmPeer


def open_peer(segment: Segment, nonce: str | None = None) -> ShmPeer:
    return ShmPeer(3, os.getpid(), segment.fd, nonce or segment.nonce)


def test_a_peer_sees_words_and_staging_and_cannot_write() -> None:
    segment = Segment()
    peer = open_peer(segment)
    segment.words[POSTED] = 7 << COUNTER | 5
    carrier = np.dtype(np.float32)
    segment.carve(REDUCED, SLOTS - 1, 10, 3, carrier)[...] = (1, 2, 3)
    assert peer.words[POSTED] == 7 << COUNTER | 5
    assert peer.carve(REDUCED, SLOTS - 1, 10, 3, carrier).tolist() == [1, 2, 3]
    with pytest.raises(TypeError):
        peer.words[POSTED] = 0
    with pytest.raises(ValueError, match="read-only"):
        peer.carve(POSTED, 0, 0, 1, carrier)[...] = 0
    # Not even somebody who opens it anew may write to it, or cut it off under its readers.
    with open(f"/proc/{os.getpid()}/fd/{segment.fd}", "r+b") as file:
        with pytest.raises(PermissionError):
            os.pwrite(file.fileno(), b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(file.fileno(), 0)


def test_a_segment_of_many_members_is_opened_by_those_who_expect_as_many() -> None:
    layout = sized(HOST, 64)
    segment = Segment(members=64)
    segment.words[level(levels(64))] = 7
    peer = ShmPeer(3, os.getpid(), segment.fd, segment.nonce, layout)
    assert peer.words[level(levels(64))] == 7
    with pytest.raises(TransportError, match=r"2 slots of .*, not 8"):
        open_peer(segment)
    fewer = sized(HOST, 40)
    assert fewer.slots == layout.slots
    with pytest.raises(TransportError, match=f"it has {layout.size} bytes, not {fewer.size}"):
        ShmPeer(3, os.getpid(), segment.fd, segment.nonce, fewer)
    assert "for 64 members" in str(layout)
    assert all(sized(HOST, members) is HOST for members in range(1, LEAST + 1))
    assert MOST_MEMBERS == KERNEL_MEMBERS


@pytest.mark.parametrize("members", range(2, MEMBERS + 1))
def test_what_a_member_gives_another_one_shrinks_with_their_number(members: int) -> None:
    assert HOP <= slot_payload(members) <= CHUNK
    assert members > 16 or slot_payload(members) == CHUNK
    assert members > 128 or SLOTS * slot_payload(members) * members <= MIRRORS
    filled = sized(HOST, members).slots * slot_payload(members) * (members - 1)
    assert filled <= (MIRRORS if members <= 512 else 2 * MIRRORS)


def test_the_word_that_tells_of_a_death_is_no_level_whoever_watches_it() -> None:
    assert not {mutex(reader) // 8 for reader in range(MEMBERS)} & {word // 8 for word in published(MEMBERS)}


@pytest.mark.parametrize("layout", [HOST, sized(HOST, 64)])
def test_regions_and_slots_do_not_overlap(layout: Layout) -> None:
    segment = Segment(layout)
    segment.words[max(segment.published)] = 7
    carrier = np.dtype(np.uint8)
    parts = [segment.carve(region, slot, 0, CHUNK, carrier) for region in (POSTED, REDUCED) for slot in range(SLOTS)]
    for value, part in enumerate(parts, start=1):
        part[...] = value
    assert [int(part.min()) for part in parts] == [int(part.max()) for part in parts] == list(range(1, 2 * SLOTS + 1))
    assert segment.words[max(segment.published)] == 7
    assert wrong(segment.words, segment.nonce, layout) is None
    assert SIZE <= 32 << 20


def test_another_segment_is_told_from_the_right_one() -> None:
    segment = Segment()
    with pytest.raises(TransportError, match="somebody else"):
        open_peer(segment, "0" * 32)
    with open(os.devnull, "rb") as file, pytest.raises(TransportError, match="replica 3"):
        ShmPeer(3, os.getpid(), file.fileno(), segment.nonce)
    fd = segment.fd
    segment.close()
    segment.close()
    with pytest.raises(TransportError, match="cannot open the segment of replica 3"):
        ShmPeer(3, os.getpid(), fd + 1000, segment.nonce)


def test_other_engines_and_layouts_are_told_apart() -> None:
    """By what the first words say, and before the size, which says little."""
    other = dataclasses.replace(HOST, magic=HOST.magic + 0x100, engine="gpu-kernel", size=SIZE + 4096)
    for mine, theirs in ((HOST, other), (other, HOST)):
        segment = Segment(theirs)
        with pytest.raises(OtherEngine, match=f"FTCOMM_ENGINE={mine.engine} .layout {mine.magic & 0xFFFF:#x}."):
            ShmPeer(3, os.getpid(), segment.fd, segment.nonce, mine)
    for change in (dict(lanes=4), dict(chunk=CHUNK // 2), dict(slots=SLOTS // 2), dict(size=SIZE - 4096)):
        segment = Segment(dataclasses.replace(HOST, **change))
        with pytest.raises(TransportError, match=r"install one version everywhere|bytes, not") as caught:
            open_peer(segment)
        assert not isinstance(caught.value, OtherEngine)


def test_nothing_is_left_of_a_segment() -> None:
    segment = Segment()
    assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:")  # in no folder: nothing can stay in one
    peer = open_peer(segment)
    segment.close()
    assert peer.words[0] == segment.words[0]  # who has it open keeps it
    assert segment.fd == -1


def test_a_descriptor_that_the_script_has_closed_is_no_error_at_the_end() -> None:
    segment = Segment()
    os.close(segment.fd)
    segment.close()


def test_too_little_memory_is_an_error_with_the_mend() -> None:
    code = """
        import resource
        from ftcomm.errors import TransportError
        from ftcomm.transport.segment import Segment
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            Segment()
        except TransportError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr
    assert "cannot reserve 16390 KB of shared memory" in done.stdout
    assert "ulimit -f; now 1048576 bytes" in done.stdout


def taken(segment: Segment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


def test_memory_is_taken_by_who_carves_it_and_what_is_there_stays() -> None:
    segment, bytes_ = Segment(chunks=0), np.dtype(np.uint8)
    reader = open_peer(segment)
    steps = [taken(segment)]
    first = segment.carve(POSTED, 1, 0, 3, bytes_)
    first[:] = 7
    steps.append(taken(segment))
    last = segment.carve(POSTED, 1, 2 * 4096 + 5, 3, bytes_)
    last[:] = 9
    steps.append(taken(segment))
    for _ in range(2):
        whole = segment.carve(POSTED, 1, 3, 3 * 4096, bytes_)  # ends in a page that no other part has
        steps.append(taken(segment))
    segment.carve(REDUCED, SLOTS, CHUNK - 2049, 2050, bytes_)  # of two chunks
    steps.append(taken(segment))
    assert steps == [8192 + 4096 * pages for pages in (0, 1, 2, 4, 4, 6)]
    assert reader.carve(POSTED, 1, 0, 3, bytes_).tolist() == first.tolist() == [7] * 3
    assert reader.carve(POSTED, 1, 2 * 4096 + 5, 3, bytes_).tolist() == last.tolist() == [9] * 3
    assert not whole[: 2 * 4096].any()
    segment.close()


@pytest.mark.parametrize("chunks", [NEAR, 2 * NEAR, None])
def test_memory_that_is_reserved_at_the_start_is_that_of_the_first_chunks(chunks: int | None) -> None:
    segment = Segment(chunks=chunks)
    before = taken(segment)
    assert before == (SIZE + STAGGER if chunks is None else 8192 + 2 * chunks * CHUNK + 4096)
    for region in (POSTED, REDUCED):
        for slot in range(chunks or SLOTS):
            segment.carve(region, slot, 0, CHUNK, np.dtype(np.uint8))[:] = 1
    assert taken(segment) == before
    segment.close()


@pytest.mark.parametrize("slot", [NEAR, 0])
def test_memory_that_cannot_be_had_later_is_an_error_and_may_be_had_then(
    slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = Segment(chunks=0 if slot == 0 else NEAR)
    before = taken(segment)
    with monkeypatch.context() as lacking:
        lacking.setattr(os, "posix_fallocate", no_memory)
        with pytest.raises(TransportError, match=r"cannot reserve 8 KB .*: No space left on device. Free memory"):
            segment.carve(POSTED, slot, 0, 9000, np.dtype(np.uint8))
        assert taken(segment) == before
    segment.carve(POSTED, slot, 0, 9000, np.dtype(np.uint8))[:] = 1
    assert taken(segment) == before + 8192
    segment.close()


def no_memory(fd: int, offset: int, length: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_file_of_the_script_grows_in_place_of_a_segment(tmp_path: Path) -> None:
    segment = Segment(chunks=0)
    with open(tmp_path / "file", "w+b") as file:
        os.dup2(file.fileno(), segment.fd)  # as if the script had closed it, and the number had come to a file
        with pytest.raises(TransportError, match="the script has closed its descriptor"):
            segment.carve(POSTED, 1, 0, 1, np.dtype(np.uint8))
        assert os.fstat(file.fileno()).st_size == 0
    segment.close()
    with pytest.raises(TransportError, match="Bad file descriptor"):
        segment.carve(POSTED, 1, 0, 1, np.dtype(np.uint8))


def test_a_segment_that_cannot_be_had_keeps_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    allocate = os.posix_fallocate
    monkeypatch.setattr(
        os, "posix_fallocate", lambda fd, at, n: allocate(fd, at, n) if at == 0 else no_memory(fd, at, n)
    )
    with pytest.raises(TransportError, match="cannot reserve 2048 KB"):
        Segment(chunks=NEAR)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("members", [2, 17, 18, 256, MEMBERS])
@pytest.mark.parametrize("region", [POSTED, REDUCED])
def test_no_chunk_begins_where_an_array_may_begin_in_its_page(members: int, region: int) -> None:
    """See `STAGGER`: arrays begin within the first bytes of a page."""
    segment = Segment(members=members, chunks=0)
    assert {(segment.address + segment.offset(region, slot)) % 4096 for slot in range(SLOTS)} == {STAGGER}
    segment.close()
