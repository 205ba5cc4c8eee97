"""Headers of whole batches equal those written and checked one by one."""

from __future__ import annotations

import numpy as np
from kernel_cases import FINGERPRINT, batch, gqa, host_pool, page_of

from mlkv import page
from mlkv.kernels.host_pages import HostPages
from mlkv.layout import RankSlice

LAYOUT = gqa(heads=3)


def test_batched_identities_and_bindings_equal_single_ones() -> None:
    pages = batch([2, 0, 5], generation=(1 << 64) - 3)
    packed = (
        page.pack_identities(
            LAYOUT,
            keys=pages.keys,
            parents=pages.parents,
            fingerprint=FINGERPRINT,
            generations=pages.generations,
        )
        .view(np.uint8)
        .reshape(3, page.IDENTITY_BYTES)
    )
    bindings = page.bindings(pages.keys, pages.generations, 1, 2)
    for at in range(3):
        one = np.zeros(LAYOUT.header_bytes, np.uint8)
        cut = slice(16 * at, 16 * at + 16)
        generation = int(pages.generations[at])
        page.write_identity(
            one, LAYOUT, page.PageIdentity(pages.keys[cut], pages.parents[cut], FINGERPRINT, generation)
        )
        np.testing.assert_array_equal(one[: page.IDENTITY_BYTES], packed[at])
        assert not one[page.IDENTITY_BYTES :].any()
        for head in (1, 2):
            assert int(bindings[at, head - 1]) == page.binding(pages.keys[cut], generation, head)


def test_batched_matching_agrees_with_single_matching_for_every_byte() -> None:
    pages = batch([0])
    packed = page.pack_identities(
        LAYOUT, keys=pages.keys, parents=pages.parents, fingerprint=FINGERPRINT, generations=pages.generations
    )
    for at in range(page.IDENTITY_BYTES + 1):
        records = packed.copy()
        headers = records.view(np.uint8).reshape(1, page.IDENTITY_BYTES)
        if at < page.IDENTITY_BYTES:
            headers[0, at] ^= 0x20
        found = page.identities_match(
            records, LAYOUT, keys=pages.keys, fingerprint=FINGERPRINT, generations=pages.generations
        )
        assert found.tolist() == [page.identity_matches(headers[0], LAYOUT, pages.keys, FINGERPRINT, 7)]
        assert found[0] == (at == page.IDENTITY_BYTES)


def test_a_batch_is_cut_into_runs() -> None:
    pages = batch([4, 2, 7, 1])
    part = pages[1:3]
    assert part.indices.tolist() == [2, 7]
    assert part.keys == pages.keys[16:48]
    assert part.parents == pages.parents[16:48]
    assert part.generations.tolist() == [8, 9]
    assert len(pages[4:4]) == 0


def test_headers_of_different_ranks_do_not_overlap() -> None:
    host = host_pool(LAYOUT, 2, fill=0)
    pages = batch([1])
    for rank, part in enumerate((RankSlice(0, 2, 2), RankSlice(2, 1, 1))):
        view = HostPages(host, LAYOUT, part, FINGERPRINT, writes_identity=rank == 1)
        view.write_identities(pages)
        assert not host[LAYOUT.page_bytes :].any() or rank, "an identity is written by one rank only"
        view.write_sums(
            pages.indices, np.full((1, part.num_written_heads), 10 + rank, np.uint64), view.sum_bindings(pages)
        )
    table = page.checksum_table(page_of(host, LAYOUT, 1), LAYOUT)
    expected = [10, 10, 11]
    for head in range(3):
        assert int(table[head]) == (expected[head] + page.binding(pages.keys, 7, head)) % 2**64
    assert page.identity_matches(page_of(host, LAYOUT, 1), LAYOUT, pages.keys, FINGERPRINT, 7)
    assert not host[: LAYOUT.page_bytes].any()
