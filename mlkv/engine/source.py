"""Which model: from what a person writes to a folder of safetensors and an identity, once, before ranks start.

Conversions (GGUF, pickled weights, checkpoints under other names than the modules of transformers) go to a
cache folder under the digest of the original, which is also the model's identity in the KV cache. What is needed
for a certain TP size is cut and padded while loading, so the identity is equal for all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig

from mlkv.engine.fetch import fetch_smollm2, publish
from mlkv.engine.tokenizer import ByteTokenizer, FolderTokenizer, Tokenizer
from mlkv.engine.weights import SINGLE_NAME, Checkpoint, RandomWeights, WeightSource, checkpoint_names
from mlkv.errors import ConfigError

DEFAULT_MODEL = "smollm2"

_CONVERSION_VERSION = 1
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")

_RANDOM_SHAPES: dict[str, dict[str, Any]] = {
    # A model for tests: heads that do not divide by 2, fewer KV heads than 4 ranks.
    "tiny": {"hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 3, "num_attention_heads": 6,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "max_position_embeddings": 4096},
    # The shapes of Llama-3.2-1B and Llama-3.1-8B; embeddings are not tied, so that the untrained model does not
    # only repeat its last token.
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072},
}  # fmt: skip

Progress = Callable[[str], None]


def _silent(_message: str) -> None:
    """The progress function of a caller that does not want any."""


@dataclass(frozen=True)
class PreparedModel:
    """A model that every rank can load at once.

    Attributes:
        name: what the person asked for.
        digest: identity of the original weights and configuration, for the KV cache's namespace.
        folder: config, safetensors and tokenizer; None for random weights.
        shape, seed: of a model with random weights.
    """

    name: str
    digest: str
    folder: Path | None
    shape: str = ""
    seed: int = 0

    def config(self) -> PretrainedConfig:
        if self.folder is not None:
            return _read_config(self.folder)
        return LlamaConfig(
            **_RANDOM_SHAPES[self.shape], tie_word_embeddings=False, rope_theta=500000.0, rms_norm_eps=1e-5,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip

    def weights(self) -> WeightSource:
        return RandomWeights(self.seed) if self.folder is None else Checkpoint(self.folder)

    def tokenizer(self) -> Tokenizer:
        return ByteTokenizer() if self.folder is None else FolderTokenizer(self.folder)


def silence_transformers() -> None:
    """Keep transformers' notices off the terminal: whatever stops us is raised as an error of ours."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"transformers(\.|$)")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def prepare_model(
    spec: str, cache_dir: Path, *, device_type: str = "cpu", seed: int = 0, progress: Progress = _silent
) -> PreparedModel:
    """Find, fetch and convert a model. Run it before the ranks start; in the ranks it then only finds the result.

    Args:
        spec: a folder, a GGUF file, a model id of the Hugging Face hub, "smollm2" (the default model), or
            "random:tiny", "random:1b", "random:8b" for a Llama-type model of that shape with random weights.
        cache_dir: folder for what is fetched, converted and digested; created when absent.
        device_type: "cpu" or "cuda": where random weights will be made, which makes different ones.
        seed: of random weights.

    Raises:
        ConfigError: there is no such model, or it is of a kind that this engine does not serve.
    """
    silence_transformers()
    kind, colon, shape = spec.partition(":")
    if kind == "random" and colon:
        if shape not in _RANDOM_SHAPES:
            raise ConfigError(
                f"model: random:{shape} is not known; there are random:{', random:'.join(_RANDOM_SHAPES)}"
            )
        return PreparedModel(spec, f"random-{shape}-{seed}-{device_type}", None, shape, seed)
    path = fetch_smollm2(cache_dir, progress) if spec == DEFAULT_MODEL else _locate(spec, progress)
    digest = _digest(path, cache_dir, progress)
    prepared = PreparedModel(spec, digest, path)
    gguf = path if path.is_file() else _only_gguf(path)
    if gguf is None:
        config = _read_config(path)
        if getattr(config, "quantization_config", None):
            raise ConfigError(
                f"model: {path} is quantised; this engine serves float32, bfloat16 and float16 weights"
            )
        if not _needs_conversion(path, config):
            return prepared
    folder = cache_dir / "converted" / f"{digest}-{_CONVERSION_VERSION}"
    if not folder.is_dir():
        progress(f"converting {path.name} to safetensors")
        _convert(path, gguf, folder)
    return replace(prepared, folder=folder)


def _locate(spec: str, progress: Progress) -> Path:
    path = Path(spec).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path.resolve()
    if path.exists():
        raise ConfigError(f"model: {path} is neither a model folder nor a GGUF file")
    if spec.count("/") != 1 or spec.startswith((".", "/", "~")):
        raise ConfigError(f"model: there is no folder {spec}")
    from huggingface_hub import snapshot_download

    progress(f"looking for {spec} on the Hugging Face hub")
    wanted = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(spec, allow_patterns=wanted))
    except Exception as error:  # the hub client raises errors of many libraries; all mean that it is not to be had
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model: there is no folder {spec}, and the hub did not give it: {reason}") from None


def _only_gguf(folder: Path) -> Path | None:
    if (folder / "config.json").is_file():
        return None
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise ConfigError(f"model: {folder} has neither config.json nor a GGUF file, so it is not a model folder")
    if len(found) > 1:
        raise ConfigError(f"model: {folder} holds {len(found)} GGUF files; name one of them")
    return found[0]


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder)
    except Exception as error:  # validators of transformers and of the hub client raise many kinds
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"model: config.json in {folder} is not one that transformers knows: {reason}") from None
    return config


def _digest(path: Path, cache_dir: Path, progress: Progress) -> str:
    """SHA-256 over config and weights. Remembered by path, size and time of change: 16 GB take 10 s to read."""
    if path.is_file():
        files = [path]
    else:
        files = sorted(f for f in path.iterdir() if f.suffix in _WEIGHT_SUFFIXES or f.name == "config.json")
    stats = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    memo = cache_dir / "digests" / hashlib.sha256(json.dumps(stats).encode()).hexdigest()
    if memo.is_file():
        return memo.read_text().strip()
    progress(f"reading {path.name} to know its identity")

    def digest_of(file: Path) -> str:
        with open(file, "rb") as data:
            if hasattr(hashlib, "file_digest"):
                return str(hashlib.file_digest(data, "sha256").hexdigest())
            digest = hashlib.sha256()
            while block := data.read(1 << 22):
                digest.update(block)
            return digest.hexdigest()

    with ThreadPoolExecutor(max_workers=8) as threads:  # hashing releases the interpreter lock
        parts = list(threads.map(digest_of, files))
    named = [(file.name, part) for file, part in zip(files, parts, strict=True)]
    digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]
    memo.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=memo.parent, prefix=".", delete=False) as scratch:
        scratch.write(digest)
    os.replace(scratch.name, memo)
    return digest


def _needs_conversion(folder: Path, config: PretrainedConfig) -> bool:
    """Whether the folder lacks safetensors under the names that the modules of transformers have."""
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(
            f"model: transformers cannot build a causal LM of type {config.model_type}: {error}"
        ) from None
    wanted = {n for n, _ in module.named_parameters()}  # a tied weight is listed, and stored, once
    return not wanted <= checkpoint_names(folder).keys()


def _convert(path: Path, gguf: Path | None, folder: Path) -> None:
    """Let transformers read the checkpoint, and write what it has in memory, under its modules' names."""
    source = gguf.parent if gguf is not None else path
    options = {"gguf_file": gguf.name} if gguf is not None else {}
    dtype = torch.bfloat16 if gguf is not None else "auto"
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bars cannot be turned off
            model, report = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except Exception as error:  # a damaged file makes its reader raise anything
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"model: transformers cannot load {gguf or path}: {reason}") from None
    wrong = sorted(report["missing_keys"]) or sorted(str(key[0]) for key in report["mismatched_keys"])
    if wrong:
        raise ConfigError(
            f"model: the weights in {gguf or path} do not fit its configuration; missing or of another shape: "
            f"{', '.join(wrong[:3])}"
        )
    if gguf is not None:  # transformers has already dequantised it, but its config still says that it is GGUF
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.dtype = torch.bfloat16
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".convert-") as scratch:
        staged = Path(scratch) / "model"
        staged.mkdir()
        weights = dict(model.named_parameters())
        weights |= {n: b for n, b in model.named_buffers() if n in model.state_dict()}
        save_file({n: w.detach().contiguous() for n, w in weights.items()}, staged / SINGLE_NAME, {"format": "pt"})
        model.config.save_pretrained(staged)
        # Without a tokenizer the model still serves token ids; asking it for text says what is missing.
        with contextlib.suppress(ValueError, OSError, KeyError, ImportError):
            AutoTokenizer.from_pretrained(source, **options).save_pretrained(staged)
        publish(staged, folder)
