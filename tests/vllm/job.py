"""What every rank of a test runs: real vLLM, a few rounds of prompts, the tokens it answered with.

python -m tests.vllm.job TASK.json OUT        (or the same under torchrun; each rank writes OUT.<rank>)
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

NUM_TALKS = 8
NEW_TOKENS = 24


def first_prompts() -> list[list[int]]:
    """Prompts of 100 to 700 tokens; every second one begins with the same 192."""
    chance = random.Random(11)
    shared = [chance.randrange(256) for _ in range(192)]
    prompts = []
    for number in range(NUM_TALKS):
        own = [chance.randrange(256) for _ in range(chance.randrange(100, 500))]
        prompts.append(shared + own if number % 2 else own)
    return prompts


def next_prompts(prompts: list[list[int]], answers: list[list[int]]) -> list[list[int]]:
    """The talk goes on: what was said, what was answered, and something new."""
    chance = random.Random(12)
    return [
        prompt + answer + [chance.randrange(256) for _ in range(20)]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def _metric(llm: Any, name: str) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == name)


def run(task: dict[str, Any], progress: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {
        "model": task["model"],
        "tensor_parallel_size": task["tp"],
        "data_parallel_size": task.get("dp", 1),
        "distributed_executor_backend": task["backend"],
        "worker_cls": task.get("worker", "auto"),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": task.get("blocks", 256),
        "disable_log_stats": False,
        "seed": 0,
    }
    if task.get("connector"):
        options["kv_transfer_config"] = {
            "kv_connector": task["connector"],
            "kv_connector_module_path": task.get("module", "mlkv.integrations.vllm"),
            "kv_role": "kv_both",
            "kv_connector_extra_config": task.get("extra", {}),
        }
    llm = LLM(**options)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=task.get("new_tokens", NEW_TOKENS), ignore_eos=True, detokenize=False
    )

    def answer(prompts: list[list[int]]) -> list[list[int]]:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(requests, sampling, use_tqdm=False)]

    rounds, seconds, hit_tokens = [], [], []
    prompts = first_prompts()
    for number in range(task.get("rounds", 3)):
        progress.write_text(str(number))
        if number or not task.get("from_second"):
            start = time.monotonic()
            rounds.append(answer(prompts))
            seconds.append(time.monotonic() - start)
        else:
            rounds.append(task["first_answers"])
        if number:
            prompts = next_prompts(prompts, rounds[-1])
        hit_tokens.append(_metric(llm, "vllm:external_prefix_cache_hits") - sum(hit_tokens))
        assert _reset(llm), "the engine still holds blocks"
        if number in task.get("invalidate_after", ()):
            assert llm.reset_prefix_cache(reset_connector=True)
    return {
        "rounds": rounds,
        "seconds": seconds,
        "hit_tokens": sum(hit_tokens),
        "hit_tokens_by_round": hit_tokens,
        "pages_from_disk": _metric(llm, "vllm:mlkv_loaded_pages_from_disk"),
        "failed_loads": _metric(llm, "vllm:mlkv_failed_loads"),
        "preemptions": _metric(llm, "vllm:num_preemptions"),
    }


def _reset(llm: Any) -> bool:
    """Forget what is on the device. With an engine in a process of its own, copies may need a moment to end."""
    give_up_at = time.monotonic() + 20
    while not llm.reset_prefix_cache():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.05)
    return True


def main() -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    out = f"{sys.argv[2]}.{os.environ.get('RANK', '0')}"
    result = run(task, Path(f"{out}.progress"))
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
