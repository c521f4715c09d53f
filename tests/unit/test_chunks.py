from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftcomm.collective.chunks import chunk_count, pack, spans, unpack
from ftcomm.transport.segment import CHUNK

ITEMSIZES = st.sampled_from((1, 2, 4, 8))


@given(st.integers(0, 1 << 30), ITEMSIZES)
def test_chunks_cover_the_op_and_fit_a_slot(count: int, itemsize: int) -> None:
    elements = CHUNK // itemsize
    chunks = chunk_count(count, elements)
    assert (chunks - 1) * elements < max(1, count) <= chunks * elements


@given(st.sets(st.integers(0, 2000)))
def test_bitmaps(chunks: set[int]) -> None:
    packed = pack(chunks, 2001)
    assert len(packed) == 251
    assert {i for i in range(2001) if unpack(packed) >> i & 1} == chunks


@given(st.lists(st.sampled_from([(0, 1), (0,), (1,), None]), min_size=1), st.integers(1, 7), st.data())
def test_spans_merge_what_is_adjacent_and_equal(
    finals: list[tuple[int, ...] | None], elements: int, data: st.DataObject
) -> None:
    count = elements * (len(finals) - 1) + data.draw(st.integers(1, elements))
    each: list[tuple[int, ...] | None] = [None] * count
    previous = None
    for start, stop, who in spans(finals, elements, count):
        assert start < stop
        assert previous is None or previous[1] < start or previous[2] != who
        previous = (start, stop, who)
        each[start:stop] = [who] * (stop - start)
    assert each == [finals[i // elements] for i in range(count)]


def test_an_op_without_elements_has_one_chunk_and_one_span() -> None:
    assert chunk_count(0, CHUNK // 4) == 1
    assert list(spans([(0, 1)], CHUNK // 4, 0)) == [(0, 0, (0, 1))]
