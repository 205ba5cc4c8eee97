"""Where a rank's weights come from: a folder of safetensors, or a seeded generator. Both give one part of one
weight at a time, so that no process ever holds the whole model in host memory."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open

from mlkv.engine.sharding import Cut
from mlkv.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class WeightSource(Protocol):
    """Gives the parts of a model's weights."""

    def read(self, name: str, shape: torch.Size, cut: Cut | None, device: torch.device) -> torch.Tensor:
        """The part `cut` (None: all) of the weight `name`, whose whole shape is `shape`, on `device`."""
        ...


class Checkpoint:
    """A folder of safetensors files, with or without an index. Only the parts asked for are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = checkpoint_names(folder)

    def read(self, name: str, shape: torch.Size, cut: Cut | None, device: torch.device) -> torch.Tensor:
        path = self.files.get(name)
        if path is None:
            raise ConfigError(f"model: {self.folder} has no weight named {name}")
        with safe_open(path, framework="pt") as file:
            part = file.get_slice(name)
            if list(part.get_shape()) != list(shape):
                raise ConfigError(
                    f"model: weight {name} in {path.name} has shape {part.get_shape()}, config.json asks for "
                    f"{list(shape)}"
                )
            if cut is not None and cut.parts == 1 and cut.dim == 0:
                return cut.pad(part[cut.start : cut.start + cut.count]).to(device)
            whole: torch.Tensor = file.get_tensor(name)
        return (whole if cut is None else cut.of(whole)).to(device)


def checkpoint_names(folder: Path) -> dict[str, Path]:
    """Weight name -> file of a safetensors folder; empty when the folder has no safetensors.

    Raises ConfigError when the index is malformed or names files that are missing.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"model: {index} is malformed: {error!r}") from None
        missing = sorted({file for file in names.values() if not (folder / file).is_file()})
        if missing:
            raise ConfigError(f"model: {folder} lacks {', '.join(missing[:3])}, which its index names")
        return {name: folder / file for name, file in names.items()}
    path = folder / SINGLE_NAME
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)
    except Exception as error:  # safetensors raises its own untyped error for a torn or foreign file
        raise ConfigError(f"model: {path} is not a readable safetensors file: {error}") from None


class RandomWeights:
    """Seeded random weights, made on the device: for every tp the parts of the same global weights.

    A matrix has standard deviation 1/sqrt(inputs), so that activations keep their size through the layers and
    attention matters for the output; embeddings have 1, norms are 1, biases 0.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def read(self, name: str, shape: torch.Size, cut: Cut | None, device: torch.device) -> torch.Tensor:
        if len(shape) < 2:
            whole = torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device=device)
        else:
            digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
            generator = torch.Generator(device=device).manual_seed(int.from_bytes(digest[:7], "little"))
            whole = torch.empty(shape, device=device, dtype=torch.float32)
            whole.normal_(0.0, 1.0 if "embed" in name else 1.0 / math.sqrt(shape[-1]), generator=generator)
        return whole if cut is None else cut.of(whole)
