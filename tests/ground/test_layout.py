"""Geometry of pages, slices of ranks, and views of pools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlkv import ConfigError, KVLayout, KVPool, Plane, RankSlice


def gqa(num_kv_heads: int = 3, page_tokens: int = 16, dtype: torch.dtype = torch.float32) -> KVLayout:
    return KVLayout.gqa(num_layers=2, num_kv_heads=num_kv_heads, head_dim=8, dtype=dtype, page_tokens=page_tokens)


@given(heads=st.integers(1, 40), tp=st.integers(1, 40))
def test_ranks_cover_every_head_and_each_is_written_once(heads: int, tp: int) -> None:
    slices = [RankSlice.of_rank(heads, tp, rank) for rank in range(tp)]
    local = RankSlice.local_kv_heads(heads, tp)
    read = [h for s in slices for h in range(s.head_start, s.head_start + s.num_heads)]
    written = [h for s in slices for h in range(s.head_start, s.head_start + s.num_written_heads)]
    assert set(read) == set(range(heads))
    assert sorted(written) == list(range(heads))
    assert all(s.num_heads <= local for s in slices)


@pytest.mark.parametrize(
    ("heads", "tp", "expected"),
    [
        (8, 2, [(0, 4, 4), (4, 4, 4)]),
        (3, 2, [(0, 2, 2), (2, 1, 1)]),
        (3, 4, [(0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 0, 0)]),
        (2, 4, [(0, 1, 1), (0, 1, 0), (1, 1, 1), (1, 1, 0)]),
        (1, 2, [(0, 1, 1), (0, 1, 0)]),
    ],
)
def test_slices_even_uneven_padded_and_replicated(
    heads: int, tp: int, expected: list[tuple[int, int, int]]
) -> None:
    assert [RankSlice.of_rank(heads, tp, rank) for rank in range(tp)] == [RankSlice(*e) for e in expected]


def test_wrong_ranks_are_refused() -> None:
    for tp, rank in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ConfigError, match="rank"):
            RankSlice.of_rank(8, tp, rank)


def test_a_page_holds_header_and_heads_without_overlap() -> None:
    layout = gqa()
    assert layout.head_bytes == 2 * 2 * 16 * 8 * 4
    assert layout.header_bytes % 512 == 0
    assert [layout.head_offset(h) for h in range(3)] == [
        layout.header_bytes + h * layout.head_bytes for h in range(3)
    ]
    assert layout.page_bytes >= layout.head_offset(2) + layout.head_bytes
    assert layout.page_bytes % 4096 == 0


def test_planes_of_odd_sizes_stay_aligned() -> None:
    planes = (Plane("k", torch.int8, 5), Plane("v", torch.int8, 5), Plane("scale", torch.float32, 1))
    layout = KVLayout(1, 1, 3, (*planes, Plane("state", torch.float16, 7, per="page")))
    assert all(offset % 16 == 0 for offset in layout.plane_offsets)
    assert layout.head_bytes % 16 == 0


def test_fingerprints_differ_for_equal_sizes() -> None:
    halves = {
        KVLayout(2, 4, 16, (Plane("k", torch.float16, 8), Plane("v", torch.float16, 8))).fingerprint,
        KVLayout(2, 4, 16, (Plane("v", torch.float16, 8), Plane("k", torch.float16, 8))).fingerprint,
        KVLayout(2, 4, 16, (Plane("k", torch.bfloat16, 8), Plane("v", torch.bfloat16, 8))).fingerprint,
        KVLayout(4, 2, 16, (Plane("k", torch.float16, 8), Plane("v", torch.float16, 8))).fingerprint,
        KVLayout(2, 4, 8, (Plane("k", torch.float16, 16), Plane("v", torch.float16, 16))).fingerprint,
    }
    assert len(halves) == 5


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_layers": 0}, "num_layers"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"page_tokens": 0}, "page_tokens"),
    ],
)
def test_impossible_layouts_are_refused_by_field(change: dict[str, int], field: str) -> None:
    sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "page_tokens": 16, **change}
    with pytest.raises(ConfigError, match=field):
        KVLayout.gqa(dtype=torch.float32, **sizes)


def test_planes_must_have_different_names() -> None:
    with pytest.raises(ConfigError, match="names must differ"):
        KVLayout(1, 1, 4, (Plane("k", torch.int8, 4), Plane("k", torch.int8, 4)))


def test_a_pool_that_does_not_fit_its_layout_is_refused() -> None:
    layout = gqa()
    good = [torch.zeros(32, 3, 8) for _ in range(2)]
    KVPool.from_layers(layout, k=good, v=good)
    with pytest.raises(ConfigError, match="1 layers"):
        KVPool.from_layers(layout, k=good[:1], v=good[:1])
    with pytest.raises(ConfigError, match="K tensors"):
        KVPool.from_layers(layout, k=good, v=good[:1])
    with pytest.raises(ConfigError, match="float16"):
        KVPool.from_layers(layout, k=[t.half() for t in good], v=[t.half() for t in good])
    with pytest.raises(ConfigError, match="whole blocks"):
        KVPool.from_layers(layout, k=[t[:31] for t in good], v=[t[:31] for t in good], block_tokens=2)
    with pytest.raises(ConfigError, match="page_tokens=16 is not a multiple of the pool's block of 32"):
        KVPool.from_layers(layout, k=good, v=good, block_tokens=32)
