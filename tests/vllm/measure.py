"""What the connector costs when idle, and what it saves on a repeated prompt, in real vLLM on CPU.

    python -m tests.vllm.measure MODEL_FOLDER [--channel ledger]
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.vllm.measure MODEL_FOLDER --tp 2

Needs the environment of scripts/test_vllm.sh. Compared runs alternate within one engine, so what else the machine
does meets both alike.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

PROMPT_TOKENS = 1024
REPEATS = 7
DECODE_TOKENS = 200

_HOOKS = (
    "bind_connector_metadata",
    "build_connector_meta",
    "build_connector_worker_meta",
    "clear_connector_metadata",
    "get_block_ids_with_load_errors",
    "get_kv_connector_kv_cache_events",
    "get_kv_connector_stats",
    "get_transfer_results",
    "handle_preemptions",
    "has_pending_block_frees",
    "has_pending_push_work",
    "save_kv_layer",
    "start_load_kv",
    "take_events",
    "update_connector_output",
    "wait_for_layer_load",
    "wait_for_save",
)
"""Of those that an idle step calls. `has_connector_metadata`, once per layer, is `bool` itself."""

_spent_cpu_s = 0.0
_num_calls = 0
_Call = TypeVar("_Call", bound=Callable[..., Any])


def _timed(call: _Call) -> _Call:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        global _spent_cpu_s, _num_calls
        _num_calls += 1
        start = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            _spent_cpu_s += time.thread_time() - start

    return timed  # type: ignore[return-value]


def __getattr__(name: str) -> Any:
    """`TimedConnector`, made when vLLM asks for it: importing it before vLLM's own setup would be too early."""
    if name != "TimedConnector":
        raise AttributeError(name)
    from mlkv.integrations.vllm import MLKVConnector

    return type(
        "TimedConnector", (MLKVConnector,), {hook: _timed(getattr(MLKVConnector, hook)) for hook in _HOOKS}
    )


def start(model: str, tp: int, channel: str) -> Any:
    from vllm import LLM

    return LLM(
        model=model,
        tensor_parallel_size=tp,
        distributed_executor_backend="external_launcher" if tp > 1 else None,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=32,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=256,
        seed=0,
        kv_transfer_config={
            "kv_connector": "TimedConnector",
            "kv_connector_module_path": "tests.vllm.measure",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": {"host_bytes": "1GiB"}, "agree": {"channel": channel}},
        },
    )


def repeated_prompts(llm: Any) -> dict[str, float]:
    """Seconds to the first token of a prompt met before, after vLLM's own cache was reset."""
    from vllm import SamplingParams

    chance = random.Random(1)
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(REPEATS + 1):
        prompt = {"prompt_token_ids": [chance.randrange(256) for _ in range(PROMPT_TOKENS)]}
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, detokenize=False), use_tqdm=False)
        for mode in seconds:
            assert llm.reset_prefix_cache()
            params = SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, skip_reading_prefix_cache=mode == "without"
            )
            begin = time.perf_counter()
            llm.generate([prompt], params, use_tqdm=False)
            seconds[mode].append(time.perf_counter() - begin)
    # The first prompt warms up.
    return {mode: statistics.median(values[1:]) for mode, values in seconds.items()}


def idle_steps(llm: Any) -> dict[str, float]:
    """Microseconds of a decode step, and of those in the connector, with no copy in flight.

    `cpu` is processor time of the thread that steps: on a busy machine it tells more than the time on the clock.
    The connector's is less by what looking at the clocks costs at so many calls.
    """
    from vllm import SamplingParams

    global _spent_cpu_s, _num_calls
    params = SamplingParams(max_tokens=DECODE_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    # Shorter than a page, so that nothing is looked up or stored while it is answered.
    llm.llm_engine.add_request("decode", {"prompt_token_ids": list(range(20))}, params)
    steps, steps_cpu, spent, calls = [], [], [], []
    while llm.llm_engine.has_unfinished_requests():
        _spent_cpu_s = 0.0
        _num_calls = 0
        begin, begin_cpu = time.perf_counter(), time.thread_time()
        llm.llm_engine.step()
        steps.append((time.perf_counter() - begin) * 1e6)
        steps_cpu.append((time.thread_time() - begin_cpu) * 1e6)
        spent.append(_spent_cpu_s * 1e6)
        calls.append(_num_calls)
    quiet = slice(len(steps) // 4, -2)
    timing_us = _timing_cpu_us(int(statistics.median(calls[quiet])))
    return {
        "step_us": statistics.median(steps[quiet]),
        "step_cpu_us": statistics.median(steps_cpu[quiet]),
        "connector_cpu_us": statistics.median(spent[quiet]) - timing_us,
    }


def _timing_cpu_us(num_calls: int) -> float:
    """Processor time that as many calls of nothing seem to take."""
    global _spent_cpu_s
    nothing = _timed(lambda: None)
    spent = []
    for _ in range(DECODE_TOKENS):
        _spent_cpu_s = 0.0
        for _ in range(num_calls):
            nothing()
        spent.append(_spent_cpu_s * 1e6)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--channel", default="auto")
    options = parser.parse_args()
    llm = start(options.model, options.tp, options.channel)
    idle = idle_steps(llm)
    first_token_s = repeated_prompts(llm)
    if os.environ.get("RANK", "0") == "0":
        print(
            json.dumps(
                {
                    "tp": options.tp,
                    **{name: round(value, 1) for name, value in idle.items()},
                    "connector_share": round(idle["connector_cpu_us"] / idle["step_cpu_us"], 4),
                    "load_average": round(os.getloadavg()[0], 1),
                    **{f"first_token_{mode}_s": round(value, 4) for mode, value in first_token_s.items()},
                    "first_token_ratio": round(first_token_s["with"] / first_token_s["without"], 3),
                }
            )
        )


if __name__ == "__main__":
    # vLLM imports this module by its name; the time it counts is that copy's.
    from tests.vllm import measure

    measure.main()
