"""Staging memory, and which way a transfer takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_device import SimEvent

from mlkv.kernels.staged import DIRECT_BYTES, DIRECT_PIECE_BYTES, choose_path
from mlkv.kernels.staging import StagingRing


@given(total=st.integers(1, 1 << 20), run=st.integers(1, 1 << 16), segment=st.integers(1, 1 << 18))
@settings(deadline=None)
def test_staging_stays_within_its_bound(total: int, run: int, segment: int) -> None:
    run *= 16
    sizes = []

    def allocate(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    ring = StagingRing(allocate, total_bytes=total, run_bytes=run, segment_bytes=segment)
    assert sum(sizes) <= max(total, run)
    assert ring.num_segments >= 2 or total < 2 * run
    taken = [ring.take(1) for _ in range(ring.num_segments)]
    assert len({piece.address for piece in taken}) == ring.num_segments
    assert all(len(piece.memory) == piece.num_pages * run for piece in taken)
    assert ring.take(1).address == taken[0].address


def test_segments_are_taken_in_turn_side_by_side_and_only_free_ones_where_wanted() -> None:
    ring = StagingRing(
        lambda size: torch.zeros(size, dtype=torch.uint8), total_bytes=80, run_bytes=16, segment_bytes=16
    )
    start = ring.take(2).address
    assert ring.take(9).num_pages == 3, "not around the end"
    busy = SimEvent()
    first = ring.take(2)
    assert first.address == start
    first.busy = [busy]
    assert [group.num_pages for group in ring.take(3).split(2)] == [2, 1]
    assert ring.take(5, only_free=True).num_pages == 1, "the first is taken in any case, the second is not free"
    assert ring.take(5).busy == [busy]
    busy.done = True
    ring.distrust(())
    assert ring.take(5, only_free=True).num_pages == 5
    again = SimEvent()
    ring.distrust((again,))
    assert ring.take(2).busy == [again], "each once"


@pytest.mark.parametrize(
    ("piece_bytes", "num_pages", "is_idle", "is_load", "path"),
    [
        (1 << 20, 1, False, False, "direct"),
        (1 << 20, DIRECT_BYTES >> 20, False, True, "direct"),
        (8 << 20, 1, False, True, "staged"),
        (8 << 20, 1, True, True, "direct"),
        (8 << 20, 1, True, False, "staged"),
        (1 << 20, 64, True, True, "staged"),
        (DIRECT_PIECE_BYTES // 2, 1024, True, False, "direct"),
        (DIRECT_PIECE_BYTES // 2, 1025, True, True, "staged"),
        (DIRECT_PIECE_BYTES // 2, 4096, False, True, "staged"),
        (DIRECT_PIECE_BYTES // 2, 256, False, False, "direct"),
        (DIRECT_PIECE_BYTES // 2, 257, False, False, "staged"),
    ],
)
def test_the_rule_sends_what_is_soon_over_direct_and_the_rest_through_staging(
    piece_bytes: int, num_pages: int, is_idle: bool, is_load: bool, path: str
) -> None:
    assert choose_path(piece_bytes, num_pages, is_idle=is_idle, is_load=is_load) == path
