"""An engine of the chaos campaign: real ranks with the real facade, whose KV is known beforehand.

The KV of a page is a hash of the page's key, stretched to the page's length. So a byte that was loaded, or that
lies in any tier, can be compared with what it must be, not only with a checksum that came along with it.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from mlkv import KVLayout, KVPool, MLKVConfig, MLKVError, MultiLevelCache, RankSlice, Replica, StepResult
from mlkv.keys import KEY_BYTES, page_keys

PAGE_TOKENS = 4
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 8
LAYOUT = KVLayout.gqa(
    num_layers=NUM_LAYERS, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=torch.float32, page_tokens=PAGE_TOKENS
)

NUM_ROOTS, NUM_BRANCHES = 6, 8
_ROOT_PAGES, _BRANCH_PAGES = 8, 6
NUM_PROMPTS = NUM_ROOTS * NUM_BRANCHES
NUM_KEYS = NUM_ROOTS * _ROOT_PAGES + NUM_PROMPTS * _BRANCH_PAGES
"""Pages that all prompts have together; more than host memory and the disk of a campaign hold."""

_PROMPT_TOKENS = (_ROOT_PAGES + _BRANCH_PAGES) * PAGE_TOKENS + 2
_LANES = 4
"""Requests that an engine has at once."""

_MEET = datetime.timedelta(seconds=10)
"""For the ranks of a replica to find each other; one that is killed before that never comes."""

_DRAIN_S = 15.0
_IDLE_S = 0.002
_TOLD_EVERY = 8
"""Steps between two looks at whether to stop, and two reports of progress."""

_ABORTED_A_STEP, _DECLINED = 0.004, 0.04
_REPORT_BYTES = 4096

Content = npt.NDArray[np.int32]


@dataclass
class Progress:
    """What an engine has done. `wrong`: bytes that were not what their key says; `failure`: why it ended early."""

    requests: int = 0
    loads: int = 0
    failed_loads: int = 0
    pages: int = 0
    pages_by_tier: dict[str, int] = field(default_factory=dict)
    stored: int = 0
    wrong: list[str] = field(default_factory=list)
    failure: str = ""
    ended: bool = False


@cache
def prompt(number: int) -> npt.NDArray[np.uint32]:
    """Tokens of one of the campaign's prompts; eight of them share their first half."""
    root, branch = number % NUM_ROOTS, number // NUM_ROOTS
    tokens = [np.random.default_rng([1, root]).integers(0, 1 << 31, _ROOT_PAGES * PAGE_TOKENS)]
    rest = _PROMPT_TOKENS - _ROOT_PAGES * PAGE_TOKENS
    tokens.append(np.random.default_rng([2, root, branch]).integers(0, 1 << 31, rest))
    return np.concatenate(tokens).astype(np.uint32)


@cache
def payload(key: bytes) -> bytes:
    """All heads of the page of this key, as they lie in it one after the other."""
    return hashlib.shake_128(key).digest(LAYOUT.payload_bytes)


@cache
def content(key: bytes) -> Content:
    """The same as an engine has it: `[layers, 2, page_tokens, heads, head_dim]`."""
    heads = np.frombuffer(payload(key), "<i4").reshape(NUM_HEADS, NUM_LAYERS, 2, PAGE_TOKENS, HEAD_DIM)
    return np.ascontiguousarray(heads.transpose(1, 2, 3, 0, 4))


@dataclass
class Lane:
    """A place for one request, with slots of its own."""

    first_slot: int
    state: Literal["idle", "asked", "loading", "storing", "leaving"] = "idle"
    request_id: str = ""
    number: int = 0
    released: bool = False
    settled: bool = False

    def slots(self, num_tokens: int) -> torch.Tensor:
        return torch.arange(self.first_slot, self.first_slot + num_tokens)


class Engine:
    """One rank. What it decides depends on the seed and on step results only, so all ranks of a replica agree."""

    def __init__(self, config: MLKVConfig, replica: Replica, seed: str, report: Path) -> None:
        self._replica = replica
        self._chance = random.Random(seed)
        self._seed = seed
        self.progress = Progress()
        self._report_fd = os.open(report, os.O_RDWR | os.O_CREAT, 0o600)
        heads = RankSlice.of_rank(NUM_HEADS, replica.size, replica.rank)
        self._heads = slice(heads.head_start, heads.head_start + heads.num_heads)
        lane_slots = -(-_PROMPT_TOKENS // PAGE_TOKENS) * PAGE_TOKENS
        shape = (NUM_LAYERS, 2, _LANES * lane_slots, heads.num_heads, HEAD_DIM)
        self._memory = torch.zeros(shape, dtype=torch.int32)
        self._kv = self._memory.numpy()
        layers = [self._memory[layer].view(torch.float32) for layer in range(NUM_LAYERS)]
        pool = KVPool.from_layers(LAYOUT, k=[pair[0] for pair in layers], v=[pair[1] for pair in layers])
        self._lanes = [Lane(at * lane_slots) for at in range(_LANES)]
        self._cache = MultiLevelCache(config, LAYOUT, pool, replica)

    def write(self, stop_file: Path) -> None:
        """Serve random prompts, and store them, until told to stop."""
        self._serve(lambda: self._chance.randrange(NUM_PROMPTS), stop_file)

    def read(self) -> None:
        """Load all that is there of each prompt once."""
        prompts = iter(range(NUM_PROMPTS))
        self._serve(lambda: next(prompts, None), None)

    def _serve(self, next_prompt: Callable[[], int | None], stop_file: Path | None) -> None:
        only_reads = stop_file is None
        steps, stopping, give_up_at = 0, False, 0.0
        while not stopping or any(lane.state != "idle" for lane in self._lanes) or self._cache.pending:
            if stop_file is not None and not stopping and steps % _TOLD_EVERY == 0:
                stopping = not self._replica.min_int(0 if stop_file.exists() else 1)
            for lane in self._lanes:
                if lane.state == "idle" and not stopping:
                    number = next_prompt()
                    stopping = number is None
                    if number is not None:
                        self._begin(lane, number)
            result = self._cache.step()
            self._apply(result, only_reads)
            if not result:
                time.sleep(_IDLE_S)
            steps += 1
            if steps % _TOLD_EVERY == 0:
                self.report()
            if stopping:
                give_up_at = give_up_at or time.monotonic() + _DRAIN_S
                if time.monotonic() > give_up_at:
                    states = [(lane.request_id, lane.state) for lane in self._lanes]
                    raise TimeoutError(f"{self._cache.pending} tasks have not ended: {states}")

    def _begin(self, lane: Lane, number: int) -> None:
        self.progress.requests += 1
        lane.request_id = f"{self._seed}/{self.progress.requests}"
        lane.number, lane.released, lane.settled, lane.state = number, False, False, "asked"
        self._kv[:, :, lane.slots(_PROMPT_TOKENS).numpy()] = -1
        self._cache.lookup(lane.request_id, prompt(number))

    def _apply(self, result: StepResult, only_reads: bool) -> None:
        for lane in self._lanes:
            name = lane.request_id
            if lane.state == "leaving":
                lane.state = "idle" if name in result.released else "leaving"
            elif lane.state != "idle" and self._chance.random() < (0 if only_reads else _ABORTED_A_STEP):
                self._cache.abort(name)
                lane.state = "leaving"
            elif lane.state == "asked" and name in result.hits:
                self._use(lane, result.hits[name].num_tokens, only_reads)
            elif lane.state == "loading" and (name in result.loaded or name in result.failed):
                self._loaded(lane, result, only_reads)
            elif lane.state == "storing":
                self._stored(lane, result)

    def _use(self, lane: Lane, num_tokens: int, only_reads: bool) -> None:
        if not num_tokens:
            self._compute(lane, 0, only_reads)
        elif not only_reads and self._chance.random() < _DECLINED:
            self._cache.decline(lane.request_id)
            self._compute(lane, 0, only_reads)
        else:
            self._cache.load(lane.request_id, lane.slots(num_tokens))
            lane.state = "loading"

    def _loaded(self, lane: Lane, result: StepResult, only_reads: bool) -> None:
        name = lane.request_id
        failure = result.failed.get(name)
        num_tokens = result.loaded[name] if failure is None else failure.num_tokens
        self.progress.loads += 1
        self.progress.failed_loads += failure is not None
        for at, key in enumerate(self._keys(lane, num_tokens)):
            start = lane.first_slot + at * PAGE_TOKENS
            have = self._kv[:, :, start : start + PAGE_TOKENS]
            if not np.array_equal(have, content(key)[:, :, :, self._heads]):
                self.progress.wrong.append(f"prompt {lane.number}, page {at}")
        self.progress.pages += num_tokens // PAGE_TOKENS
        self._compute(lane, num_tokens, only_reads)

    def _compute(self, lane: Lane, num_tokens: int, only_reads: bool) -> None:
        """Fill what was not loaded, as the model would, and store the whole."""
        if only_reads:
            lane.state = "idle"
            return
        for at, key in enumerate(self._keys(lane, _PROMPT_TOKENS)):
            if at * PAGE_TOKENS >= num_tokens:
                start = lane.first_slot + at * PAGE_TOKENS
                self._kv[:, :, start : start + PAGE_TOKENS] = content(key)[:, :, :, self._heads]
        lane.state = "storing"
        self._cache.offload(lane.request_id, prompt(lane.number), lane.slots(_PROMPT_TOKENS))

    def _stored(self, lane: Lane, result: StepResult) -> None:
        if lane.request_id in result.released:
            lane.released = True
            # Its slots are ours again, so whoever still reads them stores what nobody may find.
            self._kv[:, :, lane.slots(_PROMPT_TOKENS).numpy()] = -2
        if lane.request_id in result.offloaded or lane.request_id in result.unstored:
            lane.settled = True
            self.progress.stored += lane.request_id in result.offloaded
        if lane.released and lane.settled:
            lane.state = "idle"

    def _keys(self, lane: Lane, num_tokens: int) -> list[bytes]:
        keys = page_keys(prompt(lane.number)[:num_tokens], PAGE_TOKENS, self._cache.namespace.root())
        return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]

    def report(self) -> None:
        """Where it is read although this process may be killed at any moment."""
        self.progress.pages_by_tier = dict(self._cache.counters.loaded_pages_by_tier)
        write_report(self._report_fd, self.progress)

    def close(self) -> None:
        self._cache.close()
        self.progress.ended = True
        self.report()


def write_report(fd: int, progress: Progress) -> None:
    progress.wrong = progress.wrong[:20]
    os.pwrite(fd, json.dumps(asdict(progress)).ljust(_REPORT_BYTES).encode(), 0)


def read_report(path: Path) -> Progress:
    """What an engine has reported last; nothing if it has not come so far."""
    try:
        return Progress(**json.loads(path.read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return Progress()  # the first report is just being written


def run_rank(config: MLKVConfig, rank: int, size: int, folder: Path, name: str, reads: bool) -> None:
    """A rank's process. `name` seeds what it does. Errors that mlkv raises are told in its report."""
    log = os.open(folder / f"{name}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    report = folder / f"{name}-{rank}.json"
    try:
        replica = Replica.single()
        if size > 1:
            meet = f"file://{folder}/{name}.meet"
            dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size, timeout=_MEET)
            replica = Replica.from_world(tp=size)
        engine = Engine(config, replica, name, report)
        if reads:
            engine.read()
        else:
            engine.write(folder / "stop")
        engine.close()
    except (MLKVError, RuntimeError, TimeoutError) as error:
        logging.exception("it ends early")
        progress = read_report(report)
        progress.failure = f"{type(error).__name__}: {error}"[:1000]
        write_report(os.open(report, os.O_RDWR | os.O_CREAT, 0o600), progress)
        os._exit(1)
