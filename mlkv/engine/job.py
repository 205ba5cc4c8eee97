"""What each rank of the main job runs: the same workload without and with the cache, and its own books.

python -m mlkv.engine.job PLAN      (started by torchrun; see launch.py)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mlkv import KVPool, MLKVConfig, MultiLevelCache, Replica, init_process_group
from mlkv.engine import plan as files
from mlkv.engine.engine import Engine, pool_pages
from mlkv.engine.model import LoadedModel, load_model
from mlkv.engine.pages import DevicePages
from mlkv.engine.plan import JobPlan
from mlkv.engine.rank import DRAIN_DEADLINE_S, await_books, books_path, count_pages, report_rank, run_rank
from mlkv.engine.request import Finished, SamplingParams
from mlkv.engine.tokenizer import Tokenizer
from mlkv.engine.workload import Feed
from mlkv.errors import ConfigError, DeadlineExceeded

COLLECTIVE_DEADLINE_S = 120.0
"""No rank waits longer than this, or twice the plan's deadline, for another in a collective of the model. Ranks
that load weights or compile kernels come later than any does in a step of the cache."""

_WARM_UP_TOKENS = 192


class Rank:
    """One rank's model and place, for all runs of the workload."""

    def __init__(self, plan: JobPlan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.device = _device(plan)
        mesh = _mesh(plan)
        self.replica = Replica.from_world(tp=plan.tp, dp=plan.dp, deadline_s=plan.deadline_s)
        prepared = plan.model.prepared()
        self.tokenizer: Tokenizer = prepared.tokenizer()
        self.model: LoadedModel = load_model(prepared, device=self.device, mesh=mesh, dtype=plan.dtype)
        self._check_memory()
        self._reference: dict[str, torch.Tensor] = {}
        self._answers: dict[str, tuple[int, ...]] = {}
        self._outputs = blake2b(digest_size=16)

    def _check_memory(self) -> None:
        if self.device.type != "cuda":
            return
        fits = self.replica.min_int(pool_pages(self.model, self.plan.page_tokens))
        if fits < self.plan.pool_pages:
            raise ConfigError(
                f"device-cache: the GPU has room for {fits} pages beside the model, the plan needs "
                f"{self.plan.pool_pages}"
            )

    def run(self) -> None:
        """All phases; leaves the results in the run folder."""
        self._warm_up()
        served: dict[str, list[files.Served]] = {}
        seconds: dict[str, float] = {}
        noise: dict[str, files.LogitNoise] = {}
        cache: MultiLevelCache | None = None
        try:
            for phase in self.plan.phases:
                pages = DevicePages(self.plan.pool_pages, self.plan.page_tokens)
                pool = self.model.make_pool(pages.num_pages * pages.page_tokens)
                cache = self._cache(pool.k, pool.v) if phase == "on" else None
                start = time.perf_counter()
                engine = self._engine(pages, cache, phase)
                served[phase], against_first = self._serve(engine, phase)
                if not self.plan.exact and phase != "off":
                    noise[phase] = against_first
                seconds[phase] = time.perf_counter() - start
                _drain(engine)
            assert cache is not None
            pages.check()
            leaked = pages.num_pages - pages.num_available
            if self.replica.is_master:
                problem = f"{leaked} device pages were not returned" if leaked else ""
                audit = count_pages(cache, self.plan, self.folder, self.replica.index)
                result = files.ReplicaResult(self.replica.index, served, seconds, noise, audit, problem)
                files.write(result, books_path(self.folder, self.replica.index))
            else:
                await_books(self.plan, self.folder, self.replica.index)
            report_rank(cache, self._outputs.hexdigest(), self.plan, self.folder)
        finally:
            if cache is not None:
                cache.close()

    def _cache(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> MultiLevelCache:
        plan = self.plan
        config = MLKVConfig(
            model=plan.model.digest,
            page_tokens=plan.page_tokens,
            faults=plan.faults,
            store={"host_bytes": plan.host_bytes, "directory": Path(plan.run_folder), **plan.tiers},
        )
        layout = self.model.geometry.kv_layout(self.model.dtype, plan.page_tokens)
        pool = KVPool.from_layers(layout, k=k, v=v, block_tokens=plan.block_tokens)
        return MultiLevelCache(config, layout, pool, self.replica)

    def _engine(self, pages: DevicePages, cache: MultiLevelCache | None, phase: str) -> Engine:
        chunk = self.plan.noise_batch_tokens if phase == "noise" else self.plan.max_batch_tokens
        record = not self.plan.exact and self.replica.is_master
        return Engine(
            self.model,
            pages,
            cache,
            max_batch_tokens=chunk,
            max_running=self.plan.concurrency,
            record_logits=record,
        )

    def _warm_up(self) -> None:
        """What only the first steps of a process pay must not count for the first phase."""
        page_tokens = self.plan.page_tokens
        pages = DevicePages(min(self.plan.pool_pages, -(-_WARM_UP_TOKENS // page_tokens) + 2), page_tokens)
        self.model.make_pool(pages.num_pages * page_tokens)
        engine = Engine(self.model, pages, None, max_batch_tokens=self.plan.max_batch_tokens)
        length = min(_WARM_UP_TOKENS, pages.num_pages * page_tokens - 4, self.model.geometry.context_tokens - 4)
        tokens = [token % self.model.geometry.vocab_size for token in range(max(1, length))]
        engine.add_request("warm-up", tokens, SamplingParams(max_new_tokens=4))
        while not engine.idle:
            engine.step()

    def _serve(self, engine: Engine, phase: str) -> tuple[list[files.Served], files.LogitNoise]:
        """Answer the replica's requests. In lower precision the runs after the first take its answers."""
        asks = self.plan.asks[self.replica.index]
        feed = Feed(asks, self.tokenizer, self.plan.concurrency)
        served: list[files.Served] = []
        noise = _NoiseMeter()
        self._progress(phase, 0)
        while not feed.done:
            for ask, tokens in feed.due():
                engine.add_request(ask.request_id, tokens, self._params(ask.request_id))
            for output in engine.step():
                done = output.finished
                if done is None:
                    continue
                text = feed.answered(done.request_id, done.tokens)
                served.append(_served(done, text))
                self._outputs.update(repr((phase, done.request_id, done.tokens)).encode())
                self._keep(done, noise)
                self._progress(phase, len(served))
        return served, noise.result()

    def _params(self, request_id: str) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.plan.max_new_tokens,
            stop_ids=self.tokenizer.stop_ids,
            forced=None if self.plan.exact else self._answers.get(request_id),
        )

    def _keep(self, done: Finished, noise: _NoiseMeter) -> None:
        if self.plan.exact:
            return
        first = self._answers.setdefault(done.request_id, done.tokens) is done.tokens
        if not done.logits:
            return
        logits = torch.stack(done.logits)
        if first:
            self._reference[done.request_id] = logits
        else:
            noise.add(self._reference[done.request_id], logits)

    def _progress(self, phase: str, done: int) -> None:
        if self.replica.is_master:
            total = len(self.plan.asks[self.replica.index])
            files.write(files.Progress(phase, done, total), self.folder / f"progress{self.replica.index}.json")


class _NoiseMeter:
    """Compares logits of one run with those of the first."""

    def __init__(self) -> None:
        self._max_abs = self._max_logit = 0.0
        self._tokens = self._flipped = 0

    def add(self, reference: torch.Tensor, logits: torch.Tensor) -> None:
        """Both float32 `[tokens, vocab_size]`. A difference that is not a number counts as endless."""
        difference = (logits - reference).abs().max().nan_to_num(float("inf"))
        self._max_abs = max(self._max_abs, float(difference))
        self._max_logit = max(self._max_logit, float(reference.abs().max()))
        self._tokens += len(logits)
        self._flipped += int((logits.argmax(-1) != reference.argmax(-1)).sum())

    def result(self) -> files.LogitNoise:
        return files.LogitNoise(self._max_abs, self._max_logit, self._tokens, self._flipped)


def _served(done: Finished, text: str) -> files.Served:
    assert done.first_token_s is not None
    return files.Served(
        request_id=done.request_id,
        prompt_tokens=done.prompt_tokens,
        computed_tokens=done.computed_tokens,
        device_tokens=done.device_tokens,
        host_tokens=done.host_tokens,
        ttft_s=done.first_token_s - done.arrival_s,
        total_s=done.finish_s - done.arrival_s,
        answer=list(done.tokens),
        text=text,
    )


def _drain(engine: Engine) -> None:
    """Step until nothing is in flight. Both conditions are agreed, so all ranks stop at the same step."""
    give_up_at = time.monotonic() + DRAIN_DEADLINE_S
    while not engine.idle or (engine.cache is not None and engine.cache.pending):
        if time.monotonic() > give_up_at:
            raise DeadlineExceeded(
                f"transfers were still in flight {DRAIN_DEADLINE_S:.0f} s after the last answer"
            )
        engine.step()


def _device(plan: JobPlan) -> torch.device:
    if plan.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _collective_deadline(plan: JobPlan) -> timedelta:
    return timedelta(seconds=min(COLLECTIVE_DEADLINE_S, 2 * plan.deadline_s))


def _mesh(plan: JobPlan) -> DeviceMesh:
    """The ranks of this replica, for the model's collectives.

    Not by `init_device_mesh`: the groups that it makes wait for 30 minutes (NCCL: 10), whatever the default group
    was told (torch 2.11 and 2.13).
    """
    own: dist.ProcessGroup | None = None
    for first in range(0, plan.dp * plan.tp, plan.tp):
        ranks = list(range(first, first + plan.tp))
        made = dist.new_group(ranks, timeout=_collective_deadline(plan))
        own = made if dist.get_rank() in ranks else own
    assert own is not None
    return DeviceMesh.from_group(own, plan.device, mesh_dim_names=("tp",))


@contextmanager
def _world(plan: JobPlan) -> Iterator[None]:
    deadline = _collective_deadline(plan)
    if plan.device == "cuda":
        init_process_group("nccl", timeout=deadline, device_id=_device(plan))
    else:
        init_process_group("gloo", timeout=deadline)
    yield
    dist.destroy_process_group()


def _work(plan: JobPlan, folder: Path) -> None:
    with _world(plan):
        Rank(plan, folder).run()


def main() -> None:
    run_rank(_work)


if __name__ == "__main__":
    main()
