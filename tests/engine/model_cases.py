"""Small models, their plain transformers counterparts, and an engine over them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from mlkv.engine import DevicePages, Engine, Finished, PreparedModel, SamplingParams, load_model, prepare_model
from mlkv.engine.weights import RandomWeights

CPU = torch.device("cpu")
TINY = PreparedModel("random:tiny", "tiny", None, "tiny", 0)


@cache
def tiny_reference() -> Any:
    """random:tiny as transformers computes it: whole, with its own attention and cache."""
    model = AutoModelForCausalLM.from_config(TINY.config(), dtype=torch.float32).eval()
    weights = TINY.weights()
    model.load_state_dict({n: weights.read(n, t.shape, None, CPU) for n, t in model.state_dict().items()})
    return model


@torch.inference_mode()
def reference_answer(model: Any, prompt: Sequence[int], new: int) -> tuple[int, ...]:
    """Greedy tokens, computed without any cache."""
    row = list(prompt)
    for _ in range(new):
        row.append(int(model(torch.tensor([row]), use_cache=False).logits[0, -1].argmax()))
    return tuple(row[len(prompt) :])


def prompts(count: int, longest: int = 70, seed: int = 1) -> list[list[int]]:
    """Prompts of many lengths, some of which begin alike."""
    rng = np.random.default_rng(seed)
    common = rng.integers(0, 256, longest).tolist()
    made = []
    for index in range(count):
        own = rng.integers(0, 256, int(rng.integers(1, longest))).tolist()
        made.append(own if index % 2 else common[: int(rng.integers(1, longest))] + own[:9])
    return made


def tiny_engine(
    *,
    num_pages: int = 64,
    page_tokens: int = 4,
    mesh: DeviceMesh | None = None,
    reuse: bool = True,
    prepared: PreparedModel = TINY,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Engine:
    model = load_model(prepared, device=CPU, mesh=mesh, dtype=dtype)
    model.make_pool(num_pages * page_tokens)
    return Engine(model, DevicePages(num_pages, page_tokens, reuse=reuse), None, **options)


def serve(engine: Engine, rows: Sequence[Sequence[int]], new: int, max_steps: int = 2000) -> list[Finished]:
    """All answers, in the order of the prompts."""
    start = engine.num_steps
    for index, row in enumerate(rows):
        engine.add_request(f"{start}-{index}", row, SamplingParams(max_new_tokens=new))
    done: dict[str, Finished] = {}
    for _ in range(max_steps):
        for output in engine.step():
            if output.finished is not None:
                done[output.request_id] = output.finished
        if engine.idle:
            break
    engine.pages.check()
    return [done[f"{start}-{index}"] for index in range(len(rows))]


def save_random(config: Any, folder: Path, seed: int = 3) -> PreparedModel:
    """A folder as people have it, with random weights of a size at which attention matters."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = RandomWeights(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.read(name, parameter.shape, None, CPU))
            if name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    model.save_pretrained(folder)
    return prepare_model(str(folder), folder.parent / "cache")
