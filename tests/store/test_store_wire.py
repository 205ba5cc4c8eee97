from __future__ import annotations

import contextlib
import struct

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from mlkv.errors import StoreError
from mlkv.store import wire


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 7))
def test_frames_survive_any_cut_of_the_stream(bodies: list[bytes], piece_bytes: int):
    requests = [wire.Match(body, number) for number, body in enumerate(bodies)]
    stream = b"".join(wire.encode_frame(ticket, request) for ticket, request in enumerate(requests))
    reader = wire.FrameReader()
    frames = [
        frame for at in range(0, len(stream), piece_bytes) for frame in reader.feed(stream[at : at + piece_bytes])
    ]
    assert [(ticket, wire.decode_request(body)) for ticket, body in frames] == list(enumerate(requests))


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(garbage: bytes):
    for decode in (wire.decode_request, wire.decode_reply):
        with contextlib.suppress(wire.WireError):
            decode(garbage)


@given(
    st.recursive(
        st.none() | st.integers(-5, 5) | st.text(max_size=3), lambda s: st.lists(s) | st.dictionaries(st.text(), s)
    )
)
def test_well_formed_nonsense_is_refused(nonsense: object):
    with pytest.raises(wire.WireError):
        wire.decode_request(msgspec.msgpack.encode(nonsense))


def test_deep_nesting_is_refused():
    with pytest.raises(wire.WireError):
        wire.decode_request(b"\x91" * 100_000)


def test_oversized_frames_are_refused_on_both_sides():
    with pytest.raises(wire.WireError, match="exceeds"):
        wire.FrameReader().feed(struct.pack("<IQ", wire.MAX_BODY_BYTES + 1, 1))
    with pytest.raises(StoreError, match="exceeds"):
        wire.encode_frame(1, wire.Match(bytes(wire.MAX_BODY_BYTES), 1))


def test_reply_to_the_longest_match_fits_a_frame():
    num_keys = wire.MAX_BODY_BYTES // 16
    wire.encode_frame(1, wire.Matched(1, bytes(4 * num_keys), bytes(8 * num_keys), 0))


def test_arrays_travel_little_endian():
    pages, generations = np.array([1, 258], np.int32), np.array([2**63 + 1], np.uint64)
    reply = wire.Reserved(1, 0, 0, wire.page_bytes_of(pages), wire.generation_bytes_of(generations))
    assert reply.pages == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert reply.page_ids.tolist() == [1, 258]
    assert reply.page_generations.tolist() == [2**63 + 1]
