"""What each rank of the main job runs when the engine is vLLM: the same workload and reports as `mlkv.engine.job`.

    torchrun ... -m mlkv.integrations.vllm.job PLAN

Both runs of the workload use one engine. In the run without cache, requests read neither vLLM's prefix cache nor
mlkv, and nothing of them is stored.
"""

from __future__ import annotations

import os
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mlkv import MultiLevelCache, init_process_group
from mlkv.engine import plan as files
from mlkv.engine.model import Geometry
from mlkv.engine.plan import JobPlan
from mlkv.engine.rank import await_books, books_path, count_pages, report_rank, run_rank
from mlkv.engine.workload import Feed

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler of a rank lives in the rank
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

_WARM_UP_TOKENS = 192
_WARM_UP_ANSWER_TOKENS = 4


class Rank:
    """One rank's vLLM, and what it has to report."""

    def __init__(self, plan: JobPlan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        rank = int(os.environ["RANK"])
        self.replica = rank // plan.tp
        self.is_master = rank % plan.tp == 0
        prepared = plan.model.prepared()
        self.tokenizer = prepared.tokenizer()
        self._outputs = blake2b(digest_size=16)
        pool_tokens = plan.pool_pages * plan.page_tokens
        self._context_tokens = min(Geometry.of(prepared.config()).context_tokens, pool_tokens)
        self._llm = self._start(pool_tokens)
        self.cache = self._find_cache()

    def _start(self, pool_tokens: int) -> Any:
        from vllm import LLM

        plan = self.plan
        # Else vLLM does, and ranks that torchrun has started again may meet addresses of their former selves.
        init_process_group(plan.backend)
        settings = {
            "model": plan.model.digest,
            "page_tokens": plan.page_tokens,
            "faults": plan.faults,
            "agree": {"deadline_s": plan.deadline_s},
            "store": {"host_bytes": plan.host_bytes, "directory": plan.run_folder, **plan.tiers},
        }
        return LLM(
            model=plan.model.folder,
            tensor_parallel_size=plan.tp,
            data_parallel_size=plan.dp,
            distributed_executor_backend="external_launcher",
            worker_cls="mlkv.integrations.vllm.cpu_worker.JobWorker" if plan.device == "cpu" else "auto",
            dtype=plan.dtype,
            enforce_eager=True,
            block_size=plan.block_tokens,
            num_gpu_blocks_override=pool_tokens // plan.block_tokens + 1,  # vLLM keeps one for itself
            max_model_len=self._context_tokens,
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
        """Both runs; leaves the results in the folder of this start."""
        self._warm_up()
        served: dict[str, list[files.Served]] = {}
        seconds: dict[str, float] = {}
        problem = ""
        for phase in self.plan.phases:
            start = time.perf_counter()
            served[phase] = self._serve(phase)
            seconds[phase] = time.perf_counter() - start
            if not self._llm.reset_prefix_cache():
                problem = f"after the run with the cache {phase}, vLLM's blocks were not all returned"
        if self.is_master:
            audit = count_pages(self.cache, self.plan, self.folder, self.replica)
            result = files.ReplicaResult(self.replica, served, seconds, {}, audit, problem)
            files.write(result, books_path(self.folder, self.replica))
        else:
            await_books(self.plan, self.folder, self.replica)
        report_rank(self.cache, self._outputs.hexdigest(), self.plan, self.folder)

    def _warm_up(self) -> None:
        """What only the first steps of a process pay must not count for the first run."""
        from vllm import SamplingParams

        length = min(_WARM_UP_TOKENS, self._context_tokens - _WARM_UP_ANSWER_TOKENS)
        prompt = {"prompt_token_ids": [token % 2 + 1 for token in range(length)]}
        params = SamplingParams(
            temperature=0.0,
            max_tokens=_WARM_UP_ANSWER_TOKENS,
            skip_reading_prefix_cache=True,
            detokenize=False,
        )
        self._llm.generate([prompt], params, use_tqdm=False)
        self._llm.reset_prefix_cache()

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
        while True:
            for ask, tokens in feed.due():
                arrived[ask.request_id] = time.perf_counter()
                engine.add_request(ask.request_id, {"prompt_token_ids": tokens}, params)
            # With several replicas this is a collective over them, so each asks once in a step: one that has no
            # request left goes on with steps for nothing, in vLLM's other collectives, until all have ended.
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
        assert feed.done
        return served

    def _progress(self, phase: str, done: int) -> None:
        if self.is_master:
            total = len(self.plan.asks[self.replica])
            files.write(files.Progress(phase, done, total), self.folder / f"progress{self.replica}.json")


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


def _work(plan: JobPlan, folder: Path) -> None:
    Rank(plan, folder).run()


def main() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    run_rank(_work)


if __name__ == "__main__":
    main()
