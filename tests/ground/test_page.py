"""The self-describing page: what verifies, and everything that must not."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlkv.layout import KVLayout
from mlkv.page import (
    HEADER_IDENTITY_BYTES,
    PageIdentity,
    binding,
    checksum_table,
    checksum_weights,
    payload_checksum,
    peek_header,
    peek_headers,
    read_identity,
    verify_own_header,
    verify_page,
    write_identity,
)

LAYOUT = KVLayout.gqa(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32, page_tokens=4)
KEY, PARENT, NAMESPACE = b"k" * 16, b"p" * 16, b"n" * 16
GENERATION = 7


def write_page(seed: int = 0, generation: int = GENERATION, key: bytes = KEY) -> np.ndarray:
    page = np.zeros(LAYOUT.page_bytes, np.uint8)
    start = LAYOUT.header_bytes
    chance = np.random.default_rng(seed)
    page[start : start + LAYOUT.payload_bytes] = chance.integers(0, 256, LAYOUT.payload_bytes, dtype=np.uint8)
    write_identity(page, LAYOUT, PageIdentity(key, PARENT, NAMESPACE, generation))
    for head in range(LAYOUT.num_kv_heads):
        at = LAYOUT.head_offset(head)
        total = payload_checksum(page[at : at + LAYOUT.head_bytes]) + binding(key, generation, head)
        checksum_table(page, LAYOUT)[head] = total % 2**64
    return page


def verifies(
    page: np.ndarray, key: bytes = KEY, generation: int = GENERATION, namespace: bytes = NAMESPACE
) -> bool:
    return verify_page(page, LAYOUT, key, namespace, generation)


def test_a_written_page_verifies_and_tells_whose_it_is() -> None:
    page = write_page()
    assert verifies(page)
    assert read_identity(page, LAYOUT) == PageIdentity(KEY, PARENT, NAMESPACE, GENERATION)


def test_foreign_stale_and_other_namespaces_do_not_verify() -> None:
    page = write_page()
    assert not verifies(page, key=b"x" * 16)
    assert not verifies(page, generation=GENERATION + 1)
    assert not verifies(page, namespace=b"x" * 16)


def test_every_flipped_bit_of_identity_table_and_payload_is_seen() -> None:
    page = write_page()
    identity = range(76)
    table = range(HEADER_IDENTITY_BYTES, HEADER_IDENTITY_BYTES + 8 * LAYOUT.num_kv_heads)
    payload = range(LAYOUT.header_bytes, LAYOUT.header_bytes + LAYOUT.payload_bytes)
    for at in (*identity, *table, *payload):
        for bit in (0, 7):
            page[at] ^= 1 << bit
            assert not verifies(page), f"bit {bit} of byte {at}"
            page[at] ^= 1 << bit
    assert verifies(page)


def test_a_new_header_over_an_old_payload_does_not_verify() -> None:
    """A rank that has not copied yet: its table entries and bytes are those of the page's last owner."""
    page = write_page(generation=1, key=b"o" * 16)
    write_identity(page, LAYOUT, PageIdentity(KEY, PARENT, NAMESPACE, GENERATION))
    assert not verifies(page)
    half = write_page(seed=1)
    half[LAYOUT.head_offset(1) :] = page[LAYOUT.head_offset(1) :]
    assert not verifies(half)


def test_empty_memory_and_another_geometry_are_no_pages() -> None:
    assert read_identity(np.zeros(LAYOUT.page_bytes, np.uint8), LAYOUT) is None
    other = KVLayout.gqa(num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32, page_tokens=8)
    assert read_identity(write_page(), other) is None


@settings(deadline=None)
@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=64), data=st.data())
def test_no_changed_word_no_swap_and_no_equal_pair_of_flips_keeps_the_checksum(
    words: list[int], data: st.DataObject
) -> None:
    array = np.array(words, np.uint32)
    before = payload_checksum(array.view(np.uint8))
    i = data.draw(st.integers(0, len(words) - 1))
    j = data.draw(st.integers(0, len(words) - 1).filter(lambda value: value != i))
    changed = array.copy()
    changed[i] ^= np.uint32(data.draw(st.integers(1, 2**32 - 1)))
    assert payload_checksum(changed.view(np.uint8)) != before
    pair = array.copy()
    pair[[i, j]] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert payload_checksum(pair.view(np.uint8)) != before
    if words[i] != words[j]:
        swapped = array.copy()
        swapped[[i, j]] = swapped[[j, i]]
        assert payload_checksum(swapped.view(np.uint8)) != before


def test_checksums_do_not_depend_on_how_the_bytes_are_chunked() -> None:
    data = np.random.default_rng(0).integers(0, 256, 4 * ((1 << 16) * 2 + 5), dtype=np.uint8)
    words = data.view(np.uint32).astype(object)
    weights = checksum_weights(len(words)).astype(object)
    assert payload_checksum(data) == int((words * weights).sum()) % 2**64


def test_weights_are_odd_and_differ() -> None:
    weights = checksum_weights(1 << 16)
    assert bool((weights & np.uint64(1)).all())
    assert len(np.unique(weights)) > 0.98 * len(weights)


@pytest.mark.parametrize("head", [0, 1, 63])
def test_bindings_differ_by_head_generation_and_key(head: int) -> None:
    assert binding(KEY, 1, head) != binding(KEY, 2, head)
    assert binding(KEY, 1, head) != binding(KEY, 1, head + 1)
    assert binding(KEY, 1, head) != binding(b"x" + KEY[1:], 1, head)


def test_page_is_checked_from_its_own_header_alone() -> None:
    page = write_page()
    found = verify_own_header(page)
    assert found is not None
    assert found.identity == PageIdentity(KEY, PARENT, NAMESPACE, GENERATION)
    assert (found.num_kv_heads, found.page_tokens, found.head_bytes) == (2, 4, LAYOUT.head_bytes)
    assert (found.header_bytes, found.used_bytes) == (
        LAYOUT.header_bytes,
        LAYOUT.header_bytes + LAYOUT.payload_bytes,
    )
    assert verify_own_header(page[: found.used_bytes]) is not None
    assert verify_own_header(page[: found.used_bytes - 4]) is None, "a page that was cut short"


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_own_header_never_vouches_for_a_page_with_a_flipped_bit(data: st.DataObject) -> None:
    page = write_page()
    regions = [
        (0, 76),
        (HEADER_IDENTITY_BYTES, HEADER_IDENTITY_BYTES + 16),
        (LAYOUT.header_bytes, LAYOUT.page_bytes),
    ]
    start, end = data.draw(st.sampled_from(regions))
    end = min(end, LAYOUT.header_bytes + LAYOUT.payload_bytes)
    at = data.draw(st.integers(start, end - 1))
    page[at] ^= 1 << data.draw(st.integers(0, 7))
    assert verify_own_header(page) is None


def test_header_that_says_nothing_sensible_is_none() -> None:
    assert peek_header(np.zeros(LAYOUT.page_bytes, np.uint8)) is None
    empty = KVLayout.gqa(num_layers=1, num_kv_heads=1, head_dim=4, dtype=torch.float32, page_tokens=4)
    page = np.zeros(empty.page_bytes, np.uint8)
    write_identity(page, empty, PageIdentity(KEY, PARENT, NAMESPACE, GENERATION))
    assert peek_header(page) is not None
    page[6:8] = 0  # no heads, with a checksum that is right
    page[72:76] = np.frombuffer(zlib.crc32(page[:72].tobytes()).to_bytes(4, "little"), np.uint8)
    assert peek_header(page) is None


def test_headers_of_a_batch_say_what_each_says_alone() -> None:
    pages = np.stack([write_page(seed=seed, generation=seed, key=bytes([seed]) * 16) for seed in range(1, 7)])
    pages[1, 5] ^= 1  # version
    pages[2, 40] ^= 1  # key
    pages[3] = 0
    pages[4, LAYOUT.header_bytes] ^= 1  # payload: for the checksums to see
    found = peek_headers(pages)
    alone = [peek_header(page) for page in pages]
    assert (
        found.is_valid.tolist()
        == [header is not None for header in alone]
        == [True, False, False, False, True, True]
    )
    for number, header in enumerate(alone):
        if header is not None:
            at = slice(16 * number, 16 * number + 16)
            identity = header.identity
            assert (found.keys[at], found.parents[at], found.fingerprints[at]) == (
                identity.key,
                identity.parent,
                identity.fingerprint,
            )
            assert (int(found.generations[number]), int(found.used_bytes[number])) == (
                identity.generation,
                header.used_bytes,
            )
