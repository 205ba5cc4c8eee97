"""The memory of the ledger: whatever is torn, stale, foreign or rotten in it is not taken for an entry."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlkv.dist.ledger import FAREWELL_BYTES, NUM_SLOTS, PIECE_BYTES, SLOT_BYTES, Kind, Ledger
from mlkv.dist.protocol import REPORT_BYTES
from mlkv.errors import MLKVError

SIZE = 3
SESSION = 0x1234_5678_9ABC_DEF0


@pytest.fixture(name="ledger")
def make_ledger() -> Iterator[Ledger]:
    with_one = fresh()
    yield with_one
    with_one.close()


def fresh(session: int = SESSION) -> Ledger:
    fd, ledger = Ledger.create(SIZE, session)
    os.close(fd)
    return ledger


def image(ledger: Ledger) -> bytes:
    return bytes(ledger.words.cast("B"))


def differing(before: bytes, after: bytes) -> list[int]:
    changed = np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8)
    return [int(at) for at in np.flatnonzero(changed)]


# From seeds, because 272 bytes drawn one by one take long to draw and longer to shrink.
reports = st.integers(0, 1 << 32).map(lambda seed: random.Random(seed).randbytes(REPORT_BYTES))
steps = st.integers(1, 1 << 38)


@settings(max_examples=100, deadline=None)
@given(rank=st.integers(0, SIZE - 1), step=steps, report=reports, pick=st.data())
def test_a_report_is_read_back_and_never_with_a_byte_changed(
    rank: int, step: int, report: bytes, pick: st.DataObject
) -> None:
    ledger = fresh()
    before = image(ledger)
    ledger.put_report(rank, step, report)
    assert ledger.get_report(rank, step) == report
    assert ledger.read_token(ledger.words[ledger.token_at[rank]]) == (step, Kind.FULL)
    written = differing(before, image(ledger))
    token = ledger.token_at[rank] * 8
    inside = [at for at in written if not token <= at < token + 8]
    at = pick.draw(st.sampled_from(inside))
    flip = pick.draw(st.integers(1, 255))
    ledger.words.cast("B")[at] ^= flip
    assert ledger.get_report(rank, step) is None
    ledger.close()


@settings(max_examples=100, deadline=None)
@given(step=steps, old=reports, new=reports, cut=st.integers(1, REPORT_BYTES - 1))
def test_half_of_a_report_over_half_of_the_last_is_not_a_report(
    step: int, old: bytes, new: bytes, cut: int
) -> None:
    ledger = fresh()
    ledger.put_report(1, step, old)
    half_old = image(ledger)
    ledger.put_report(1, step + 1, new)
    start = ledger.token_at[1] * 8 + 2 * 64  # of checksum, length and report
    behind = slice(start + 8 + cut, start + 8 + REPORT_BYTES)
    with ledger.words.cast("B") as memory:
        memory[behind] = half_old[behind]
    torn = new[:cut] + old[cut:]
    assert ledger.get_report(1, step + 1) == (new if torn == new else None)
    ledger.close()


@settings(max_examples=200, deadline=None)
@given(step=st.integers(0, 1 << 38), kind=st.sampled_from(Kind), at=st.integers(0, 7), flip=st.integers(1, 255))
def test_a_token_with_a_byte_changed_is_no_token_of_a_step_near_it(
    step: int, kind: Kind, at: int, flip: int
) -> None:
    ledger = fresh()
    word = ledger.token(step, kind) ^ (flip << 8 * at)
    found, _ = ledger.read_token(word)
    assert abs(found - step) > 1 << 20
    ledger.close()


def test_tokens_of_other_steps_kinds_and_sessions_differ(ledger: Ledger) -> None:
    other = fresh(SESSION + 1)
    tokens = {ledger.token(step, kind) for step in range(5000) for kind in Kind}
    assert len(tokens) == 5000 * len(Kind)
    assert not tokens & {other.token(step, kind) for step in range(5000) for kind in Kind}
    other.close()


def test_a_report_of_an_earlier_step_is_not_one_of_this_step(ledger: Ledger) -> None:
    ledger.put_report(1, 7, bytes(REPORT_BYTES))
    assert ledger.get_report(1, 8) is None
    assert ledger.get_report(2, 7) is None
    assert ledger.get_farewell(1, 7) is None


@settings(max_examples=60, deadline=None)
@given(number=st.integers(1, 10 * NUM_SLOTS), size=st.integers(1, 3 * PIECE_BYTES), pick=st.data())
def test_a_piece_is_read_back_and_never_with_a_byte_changed(number: int, size: int, pick: st.DataObject) -> None:
    ledger = fresh()
    message = random.Random(size).randbytes(size)
    before = image(ledger)
    ledger.put_piece(number, memoryview(message), 0)
    assert ledger.get_piece(number) == (size, message[:PIECE_BYTES])
    assert ledger.get_piece(number + NUM_SLOTS) is None
    written = differing(before, image(ledger))
    assert written[-1] - written[0] < SLOT_BYTES
    at = pick.draw(st.sampled_from(written))
    ledger.words.cast("B")[at] ^= pick.draw(st.integers(1, 255))
    assert ledger.get_piece(number) is None
    ledger.close()


def test_a_slot_used_again_no_longer_shows_its_old_piece(ledger: Ledger) -> None:
    ledger.put_piece(3, memoryview(b"old"), 0)
    ledger.put_piece(3 + NUM_SLOTS, memoryview(b"newer"), 0)
    assert ledger.get_piece(3) is None
    assert ledger.get_piece(3 + NUM_SLOTS) == (5, b"newer")


def test_ranks_do_not_write_over_each_other(ledger: Ledger) -> None:
    for rank in range(SIZE):
        ledger.put_report(rank, 1, bytes([rank]) * REPORT_BYTES)
        ledger.put_cursor(rank, 100 + rank)
    ledger.put_farewell(1, 9, b"x" * FAREWELL_BYTES)
    ledger.put_piece(NUM_SLOTS, memoryview(bytes(PIECE_BYTES)), 0)
    assert ledger.get_farewell(1, 9) == b"x" * FAREWELL_BYTES
    for rank in range(SIZE):
        assert ledger.get_report(rank, 1) == bytes([rank]) * REPORT_BYTES
        assert ledger.cursor(rank) == 100 + rank


def test_memory_of_another_session_or_size_is_refused() -> None:
    fd, ledger = Ledger.create(SIZE, SESSION)
    path = f"/proc/self/fd/{fd}"
    again = Ledger.attach(path, SIZE, SESSION)
    again.put_cursor(0, 5)
    assert ledger.cursor(0) == 5
    with pytest.raises(MLKVError, match="not the ledger of this session"):
        Ledger.attach(path, SIZE, SESSION + 1)
    with pytest.raises(MLKVError, match="not a ledger of 4 ranks"):
        Ledger.attach(path, SIZE + 1, SESSION)
    os.close(fd)
    with pytest.raises(MLKVError, match="cannot open the master's ledger"):
        Ledger.attach(path, SIZE, SESSION)
    again.close()
    ledger.close()
