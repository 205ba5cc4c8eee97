"""What each rank of the main job runs when the engine is vLLM: the same workload and reports as `mlkv.engine.job`.

    torchrun ... -m mlkv.integrations.vllm.job PLAN

Both runs of the workload use one engine. In the run without cache, requests read neither vLLM's prefix cache nor
mlkv; before the run with it, everything is forgotten.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mlkv import ConfigError, MLKVError, MultiLevelCache
from mlkv.engine import plan as files
from mlkv.engine.plan import JobPlan
from mlkv.engine.processes import die_with_parent
from mlkv.engine.workload import Feed

_BLOCK_TOKENS = 32
"""Of vLLM's KV cache: the smallest block that its CPU backend takes."""

_REPLICAS_DEADLINE_S = 1800.0
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler of a rank lives in the rank
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Rank:
    """One rank's vLLM, and what it has to report."""

    def __init__(self, plan: JobPlan) -> None:
        if plan.model.folder is None:
            raise ConfigError(f"model: vLLM reads models from folders, {plan.model.name} has none")
        if not plan.exact:
            raise ConfigError("dtype: with vLLM the job compares tokens, which needs float32")
        if plan.page_tokens % _BLOCK_TOKENS:
            raise ConfigError(f"page-size: vLLM needs a multiple of {_BLOCK_TOKENS}, got {plan.page_tokens}")
        self.plan = plan
        self.folder = Path(plan.run_folder)
        self.rank = int(os.environ["RANK"])
        self.replica = self.rank // plan.tp
        self.is_master = self.rank % plan.tp == 0
        self.tokenizer = plan.model.prepared().tokenizer()
        self._outputs = blake2b(digest_size=16)
        self._llm = self._start()
        self.cache = self._find_cache()

    def _start(self) -> Any:
        from vllm import LLM

        plan = self.plan
        pool_tokens = plan.pool_pages * plan.page_tokens
        context = plan.model.prepared().config().max_position_embeddings
        settings = {
            "model": plan.model.digest,
            "page_tokens": plan.page_tokens,
            "faults": plan.faults,
            "store": {"host_bytes": plan.host_bytes, "directory": str(self.folder)},
        }
        return LLM(
            model=plan.model.folder,
            tensor_parallel_size=plan.tp,
            data_parallel_size=plan.dp,
            distributed_executor_backend="external_launcher",
            dtype=plan.dtype,
            enforce_eager=True,
            block_size=_BLOCK_TOKENS,
            num_gpu_blocks_override=pool_tokens // _BLOCK_TOKENS + 1,  # vLLM keeps one for itself
            max_model_len=min(context, pool_tokens),
            max_num_seqs=plan.concurrency,
            max_num_batched_tokens=plan.max_batch_tokens,
            seed=0,
            kv_transfer_config={
                "kv_connector": "MLKVConnector",
                "kv_connector_module_path": "mlkv.integrations.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": settings,
            },
        )

    def _find_cache(self) -> MultiLevelCache:
        from mlkv.integrations.vllm import MLKVConnector

        (cache,) = MLKVConnector.local_caches()
        return cache

    def run(self) -> None:
        """Both runs; leaves the results in the run folder."""
        served: dict[str, list[files.Served]] = {}
        seconds: dict[str, float] = {}
        for phase in self.plan.phases:
            start = time.perf_counter()
            served[phase] = self._serve(phase)
            seconds[phase] = time.perf_counter() - start
            # Only what the run with the cache stored is counted below.
            emptied = self._llm.reset_prefix_cache(reset_connector=phase == "off")
            problem = "" if emptied else "vLLM's blocks were not all returned"
        written = self.folder / f"replica{self.replica}.json"
        if self.is_master:
            audit = self._count_pages()
            files.write(files.ReplicaResult(self.replica, served, seconds, {}, audit, problem), written)
        else:  # stays a client of the store until it is counted
            files.wait_for([written], _REPLICAS_DEADLINE_S)
        self._report()

    def _serve(self, phase: str) -> list[files.Served]:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        feed = Feed(self.plan.asks[self.replica], self.tokenizer, self.plan.concurrency)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self.plan.max_new_tokens,
            stop_token_ids=list(self.tokenizer.stop_ids),
            skip_reading_prefix_cache=phase == "off",
            detokenize=False,
        )
        arrived: dict[str, float] = {}
        first: dict[str, float] = {}
        served: list[files.Served] = []
        # Replicas without requests left still take part in vLLM's own collectives over all of them.
        while not feed.done or engine.has_unfinished_requests():
            for ask, tokens in feed.due():
                arrived[ask.request_id] = time.perf_counter()
                engine.add_request(ask.request_id, {"prompt_token_ids": tokens}, params)
            if not engine.has_unfinished_requests():
                break
            for output in engine.step():
                answer = list(output.outputs[0].token_ids)
                if answer:
                    first.setdefault(output.request_id, time.perf_counter())
                if output.finished:
                    text = feed.answered(output.request_id, answer)
                    start = arrived[output.request_id]
                    served.append(_served(output, answer, text, start, first[output.request_id]))
                    self._outputs.update(repr((phase, output.request_id, answer)).encode())
                    self._progress(phase, len(served))
        return served

    def _progress(self, phase: str, done: int) -> None:
        if self.is_master:
            total = len(self.plan.asks[self.replica])
            files.write(files.Progress(phase, done, total), self.folder / f"progress{self.replica}.json")

    def _count_pages(self) -> files.StoreAudit:
        """The books of the store once every replica has drained: they share it, and until then hold pages."""
        (self.folder / f"drained{self.replica}").touch()
        files.wait_for([self.folder / f"drained{index}" for index in range(self.plan.dp)], _REPLICAS_DEADLINE_S)
        report = self.cache.audit()
        return files.StoreAudit(**{name: getattr(report, name) for name in files.StoreAudit.__struct_fields__})

    def _report(self) -> None:
        stats = self.cache.stats()
        counted = ("steps", "loaded_pages", "loaded_bytes", "offloaded_pages", "offloaded_bytes")
        told = (*counted, "failed_loads", "failed_offloads", "agree_us", "channel")
        result = files.RankResult(
            rank=self.rank,
            results_digest=self.cache.results_digest.hex(),
            outputs_digest=self._outputs.hexdigest(),
            **{name: getattr(stats, name) for name in told},
        )
        files.write(result, self.folder / f"rank{self.rank}.json")


def _served(output: Any, answer: list[int], text: str, start: float, first: float) -> files.Served:
    reused = output.num_cached_tokens or 0
    loaded = (output.kv_transfer_params or {}).get("mlkv_loaded_tokens", 0)
    prompt_tokens = len(output.prompt_token_ids)
    return files.Served(
        request_id=output.request_id,
        prompt_tokens=prompt_tokens,
        computed_tokens=prompt_tokens - reused,
        device_tokens=reused - loaded,
        host_tokens=loaded,
        ttft_s=first - start,
        total_s=time.perf_counter() - start,
        answer=answer,
        text=text,
    )


def main() -> None:
    die_with_parent(signal.SIGKILL)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rank = int(os.environ["RANK"])
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(levelname)s %(name)s: %(message)s")
    plan = files.read(Path(sys.argv[1]), JobPlan)
    try:
        Rank(plan).run()
    except BaseException as error:  # reported to the launcher, whatever it is
        expected, trace = isinstance(error, MLKVError), traceback.format_exc()
        record = files.RankError(rank, time.time(), type(error).__name__, str(error), expected, trace)
        files.write(record, Path(plan.run_folder) / f"error{rank}.json")
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without destructors that wait for the other ranks


if __name__ == "__main__":
    main()
