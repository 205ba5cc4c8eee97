"""The command line of `./launch.sh`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import ByteSize, TypeAdapter, ValidationError

from mlkv.errors import ConfigError

PROGRAM = "launch.sh"

_DESCRIPTION = """\
Serves a workload on a real model under torchrun, with tensor and data parallelism, twice: without and with the
multi-level KV cache. Prints where the tokens of the prompts came from, how long the first token took, and whether
three audits hold. Without options: SmolLM2-135M (fetched once), two ranks, GPUs where there are enough, else CPU.

  ./launch.sh                                   the default job
  ./launch.sh --tp 4 --json report.json         four ranks; the report as JSON as well
  ./launch.sh --model ~/models/llama --tp 2     a model of yours
  ./launch.sh --disk ~/kv                       run it twice: the second job finds its prompts on disk
  ./launch.sh --engine vllm                     the same in vLLM, of which an environment is made where it is not
  ./launch.sh --tp 2 --dp 2 -- script.py ARGS   a script of yours under torchrun, in the same environment
"""

_EPILOG = """\
exit status: 0 all audits hold; 1 an audit failed or a rank did; 2 wrong options or input; 128 + N signal N.
environment: MLKV_HOME (default ~/.cache/mlkv) keeps fetched and converted models; PYTHON names the interpreter.
"""

ENGINES = ("builtin", "vllm")

_BLOCK_TOKENS = {"builtin": 16, "vllm": 32}
"""In a block of the device pool; for vLLM the smallest that its CPU backend takes, and then a multiple of it."""

_DEFAULT_MODEL = "smollm2"
_DEFAULT_TP = 2
_DEFAULT_VLLM_TP = 3
"""For the default model: vLLM gives each rank as many query heads, which are 9."""


@dataclass(frozen=True)
class Options:
    """What a person asked for. `script`: a program of theirs to run instead of the main job, with arguments."""

    engine: str
    tp: int
    dp: int
    model: str
    device: str
    dtype: str
    prompts: Path | None
    max_new_tokens: int
    host_bytes: int | None
    disk: Path | None
    disk_bytes: int | None
    remote: str | None
    device_bytes: int | None
    page_tokens: int
    block_tokens: int
    faults: str
    json: Path | None
    port: int | None
    max_restarts: int
    script: tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse(argv: Sequence[str]) -> Options:
    """Raises ConfigError for what cannot be right whatever model and machine there are."""
    argv = list(argv)
    own, script = argv, []
    if "--" in argv:
        at = argv.index("--")
        own, script = argv[:at], argv[at + 1 :]
    parser = _parser()
    args = parser.parse_args(own)
    if "--" in argv:
        _check_script(parser, args, script)
    block_tokens = args.block_size or _BLOCK_TOKENS[args.engine]
    page_tokens = args.page_size or block_tokens
    if args.engine == "vllm":
        _check_vllm(args, block_tokens)
    if page_tokens % block_tokens:
        raise ConfigError(
            f"page-size: {page_tokens} tokens are not a multiple of the device pool's block of "
            f"{block_tokens} tokens (--block-size)"
        )
    if args.disk_bytes is not None and args.disk is None:
        raise ConfigError("disk-bytes: there is no --disk whose size it could be")
    return Options(
        engine=args.engine,
        tp=args.tp or _default_tp(args),
        dp=args.dp,
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        prompts=args.prompts,
        max_new_tokens=args.max_new_tokens,
        host_bytes=args.host_cache,
        disk=args.disk,
        disk_bytes=args.disk_bytes,
        remote=args.remote,
        device_bytes=args.device_cache,
        page_tokens=page_tokens,
        block_tokens=block_tokens,
        faults=args.faults,
        json=args.json,
        port=args.port,
        max_restarts=args.max_restarts,
        script=tuple(script),
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--engine",
        choices=ENGINES,
        default="builtin",
        help="what serves the model: mlkv's own small engine (default), or vLLM with one scheduler in each rank "
        "(external_launcher), in float32",
    )
    add(
        "--tp",
        type=_count,
        metavar="N",
        help="ranks that share one model (default: 2; in vLLM 3 for the default model, whose heads they divide)",
    )
    add("--dp", type=_count, default=1, metavar="N", help="replicas, each with requests of its own (default: 1)")
    add(
        "--model",
        default=_DEFAULT_MODEL,
        metavar="DIR|ID|random:SHAPE",
        help="a model folder, a GGUF file, an id of the Hugging Face hub, smollm2 (default), or random:tiny, "
        "random:1b, random:8b: a Llama of that shape with seeded random weights",
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where it is there")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="default: float32 on CPU, bfloat16 on GPU",
    )
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help='requests of yours, one a line: {"prompt": TEXT}, {"messages": [{"role": ..., "content": ...}]} or '
        "plain text; default: questions about documents of the standard library",
    )
    add("--max-new-tokens", type=_count, default=24, metavar="N", help="tokens of an answer at most (default: 24)")
    add(
        "--host-cache", type=_size, metavar="SIZE", help="host memory for KV; default: room for the whole workload"
    )
    add(
        "--disk",
        type=Path,
        metavar="DIR",
        help="keep KV in this folder as well: the next job with the same model finds it there (default: no disk)",
    )
    add("--disk-bytes", type=_size, metavar="SIZE", help="the most that may lie there (default: 64 GiB)")
    add(
        "--remote",
        metavar="URL",
        help="keep KV in a remote store as well: mooncake://HOST:PORT, s3://BUCKET/PREFIX, redis://HOST:PORT/DB; "
        "passwords and keys come from its usual environment variables, or MLKV_STORE__REMOTE__... (default: none)",
    )
    add(
        "--device-cache",
        type=_size,
        metavar="SIZE",
        help="device memory for KV on each rank; default: room for a third of the workload, so that the host "
        "cache has something to do",
    )
    add("--page-size", type=_page, metavar="N", help="tokens in a page (default: one block)")
    add(
        "--block-size",
        type=_count,
        metavar="N",
        help="tokens in a block of the device pool (default: 16; in vLLM 32)",
    )
    add(
        "--faults",
        default="",
        metavar="SPEC",
        help="make transfers late or fail, such as delay=rank1:0-200ms,fail=rank1:0.05,seed=7 (see "
        "mlkv/faults.py); the audits must hold all the same",
    )
    add("--json", type=Path, metavar="FILE", help="write the report there as well, with all answers")
    add("--port", type=_port, metavar="N", help="port of torchrun's rendezvous (default: a free one)")
    add(
        "--max-restarts",
        type=_restarts,
        default=0,
        metavar="N",
        help="how often torchrun starts all ranks again when one has failed (default: 0)",
    )
    return parser


def _default_tp(args: argparse.Namespace) -> int:
    return _DEFAULT_VLLM_TP if args.engine == "vllm" and args.model == _DEFAULT_MODEL else _DEFAULT_TP


def _check_vllm(args: argparse.Namespace, block_tokens: int) -> None:
    """Raises ConfigError for what the main job cannot do in vLLM."""
    if args.model.startswith("random:"):
        raise ConfigError(f"model: vLLM reads models from folders; {args.model} has none")
    if args.dtype not in ("auto", "float32"):
        raise ConfigError(
            f"dtype: in vLLM the job compares answers token for token, which takes float32, not {args.dtype}"
        )
    if block_tokens % _BLOCK_TOKENS["vllm"]:
        raise ConfigError(
            f"block-size: vLLM takes multiples of {_BLOCK_TOKENS['vllm']} tokens, not {block_tokens}"
        )


def _check_script(parser: argparse.ArgumentParser, args: argparse.Namespace, script: Sequence[str]) -> None:
    if not script:
        raise ConfigError("nothing follows --; expected a script and its arguments")
    if not Path(script[0]).is_file():
        raise ConfigError(f"there is no script {script[0]}")
    for name, value in vars(args).items():
        if name not in ("tp", "dp", "port", "max_restarts") and value != parser.parse_args([]).__dict__[name]:
            raise ConfigError(
                f"--{name.replace('_', '-')} is not for scripts of yours; --tp, --dp, --port, --max-restarts are"
            )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _restarts(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _page(text: str) -> int:
    if _count(text) > 4096:
        raise argparse.ArgumentTypeError(f"a page holds 4096 tokens at most, not {text}")
    return int(text)


def _port(text: str) -> int:
    if _count(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be at most 65535, not {text}")
    return int(text)


def _size(text: str) -> int:
    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 512MiB or 8GiB, not {text!r}")
    return size
