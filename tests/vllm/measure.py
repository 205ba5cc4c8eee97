"""What the connector costs when idle, and what it saves on a repeated prompt, in real vLLM on CPU.

    python -m tests.vllm.measure MODEL_FOLDER [--channel ledger]
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.vllm.measure MODEL_FOLDER --tp 2

Needs the environment of scripts/test_vllm.sh. Compared runs alternate within one engine, so what else the machine
does meets both alike.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from mlkv.bench.paired import paired_ratio

PROMPT_TOKENS = 1024
REPEATS = 7

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

_TURN_STEPS = 8
_NUM_TURNS = 160
"""Decode steps are measured in turns of `_TURN_STEPS`, every other one of them without the connector."""

_is_left_out = False
_Call = TypeVar("_Call", bound=Callable[..., Any])


def _optional(call: _Call, when_left_out: Any) -> _Call:
    @functools.wraps(call, updated=())  # a type's attributes are not a function's
    def perhaps(*args: Any, **kwargs: Any) -> Any:
        return when_left_out if _is_left_out else call(*args, **kwargs)

    return perhaps  # type: ignore[return-value]


def __getattr__(name: str) -> Any:
    """`OptionalConnector`, made when vLLM asks for it: importing it before vLLM's own setup would be too early."""
    if name != "OptionalConnector":
        raise AttributeError(name)
    from mlkv.integrations.vllm import MLKVConnector, connector

    idle = {
        "build_connector_meta": connector.NO_ORDERS,
        "get_transfer_results": connector._NOTHING_OVER,
        "get_block_ids_with_load_errors": frozenset(),
        "take_events": (),
        "has_pending_block_frees": False,
        "has_pending_push_work": False,
    }

    def optional_hook(hook: str) -> Any:
        found = inspect.getattr_static(MLKVConnector, hook)
        if isinstance(found, staticmethod):
            return staticmethod(_optional(found.__func__, idle.get(hook)))
        return _optional(found, idle.get(hook))

    @functools.wraps(MLKVConnector.__init__)
    def make(self: Any, *args: Any) -> None:
        MLKVConnector.__init__(self, *args)
        for hook in vars(self).keys() & set(_HOOKS):  # those that an instance has of its own
            setattr(self, hook, _optional(getattr(self, hook), idle.get(hook)))

    return type(
        "OptionalConnector", (MLKVConnector,), {"__init__": make} | {hook: optional_hook(hook) for hook in _HOOKS}
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
            "kv_connector": "OptionalConnector",
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
    """Microseconds of a decode step, and what the connector adds to it with no copy in flight.

    Every other turn of some steps leaves the connector out, on all ranks alike: its hooks say at once that there
    is nothing, and nothing is agreed. What it adds is the difference of neighbouring turns.
    """
    from vllm import SamplingParams

    global _is_left_out
    params = SamplingParams(max_tokens=1900, temperature=0.0, ignore_eos=True, detokenize=False)
    # Shorter than a page, so that nothing is looked up; what is decoded is stored when it ends, between turns.
    with_s, without_s = [], []
    for number in range(_NUM_TURNS):
        if number % 40 == 0:
            llm.llm_engine.abort_request([f"decode{number - 40}"])
            llm.llm_engine.add_request(f"decode{number}", {"prompt_token_ids": list(range(20))}, params)
            for _ in range(2 * _TURN_STEPS):
                llm.llm_engine.step()
        for _is_left_out in (False, True) if number % 2 else (True, False):
            times = []
            for _ in range(_TURN_STEPS):
                begin = time.perf_counter()
                llm.llm_engine.step()
                times.append(time.perf_counter() - begin)
            (without_s if _is_left_out else with_s).append(statistics.median(times))
    _is_left_out = False
    llm.llm_engine.abort_request([f"decode{_NUM_TURNS - 40}"])
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    ratio = paired_ratio(np.array(with_s), np.array(without_s))
    step_us = statistics.median(without_s) * 1e6
    return {
        "step_us": step_us,
        "connector_us": (ratio.median - 1) * step_us,
        "connector_us_low": (ratio.low - 1) * step_us,
        "connector_us_high": (ratio.high - 1) * step_us,
    }


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
                    "connector_share": round(idle["connector_us"] / idle["step_us"], 4),
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
