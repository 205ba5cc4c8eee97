"""`./launch.sh --engine vllm` up to the start of its ranks, and what it refuses; no vLLM is needed here.

tests/vllm/test_main_job.py runs the job itself.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlkv import ConfigError
from mlkv.engine import launch, on_vllm, options
from mlkv.engine import plan as files
from mlkv.engine.model import Geometry
from mlkv.engine.options import Options
from mlkv.engine.plan import JobPlan
from mlkv.errors import MLKVError
from tests.job.jobs import ROOT
from tests.vllm.tiny_model import make_model


def parse(*arguments: str) -> Options:
    return options.parse(["--engine", "vllm", *arguments])


def test_blocks_and_pages_default_to_what_vllm_takes() -> None:
    found = parse("--model", "/some/folder")
    assert (found.engine, found.block_tokens, found.page_tokens) == ("vllm", 32, 32)
    found = parse("--model", "/some/folder", "--page-size", "96")
    assert (found.block_tokens, found.page_tokens) == (32, 96)
    found = options.parse([])
    assert (found.engine, found.block_tokens, found.page_tokens) == ("builtin", 16, 16)


def test_default_ranks_divide_the_heads_of_the_default_model() -> None:
    assert parse().tp == 3
    assert parse("--model", "/some/folder").tp == 2
    assert parse("--tp", "1").tp == 1
    assert options.parse([]).tp == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "random:tiny"], "model: vLLM reads models from folders; random:tiny has none"),
        (["--dtype", "bfloat16"], "dtype: in vLLM the job compares answers token for token, which takes float32"),
        (["--page-size", "48"], "page-size: 48 tokens are not a multiple of the device pool's block of 32 tokens"),
        (["--block-size", "16"], "block-size: vLLM takes multiples of 32 tokens, not 16"),
        (["--", __file__], "--engine is not for scripts of yours"),
    ],
)
def test_options_that_do_not_go_with_vllm_are_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse(*arguments)


def geometry(q_heads: int, kv_heads: int) -> Geometry:
    return Geometry(1, q_heads, kv_heads, 64, 100, 4096)


def test_ranks_that_vllm_cannot_share_heads_among_are_refused_with_those_that_work() -> None:
    with pytest.raises(ConfigError, match=r"2 ranks cannot share 9 query and 3 KV heads so; .* work: 1, 3, 9"):
        on_vllm.check_split(geometry(9, 3), 2)
    for tp in (1, 3, 9):
        on_vllm.check_split(geometry(9, 3), tp)
    on_vllm.check_split(geometry(32, 8), 16)  # more ranks than KV heads


def test_a_python_without_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"engine: .*python.* has no vLLM; \./launch.sh makes an environment"):
        on_vllm.device()


class StartedJob:
    """Takes the place of torchrun; keeps what it would have run."""

    command: list[str]
    plan: JobPlan
    mode: int

    def __init__(self, command: list[str], environment: dict[str, str], **_: object) -> None:
        type(self).command = command
        path = Path(command[-1])
        type(self).plan = files.read(path, JobPlan)
        type(self).mode = path.parent.stat().st_mode & 0o777
        raise MLKVError("no ranks here")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[StartedJob]]:
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("MLKV_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(launch, "Job", StartedJob)
    monkeypatch.setattr(launch, "interruptible", lambda: None)
    monkeypatch.setattr(on_vllm, "device", lambda: "cpu")
    yield StartedJob
    assert list(runtime.iterdir()) == []


def test_ranks_run_the_vllm_job_with_the_plan(started: type[StartedJob], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    arguments = ["--tp", "3", "--dp", "2", "--disk", str(tmp_path / "kv"), "--faults", "fail=rank1:0.1"]
    assert launch.main(["--engine", "vllm", "--model", str(model), *arguments]) == 1
    assert started.command[-3:-1] == ["-m", "mlkv.integrations.vllm.job"]
    assert "--nproc-per-node=6" in started.command
    assert started.mode == 0o700  # the store's socket lies there
    plan = started.plan
    assert (plan.engine, plan.dtype, plan.device) == ("vllm", "float32", "cpu")
    assert (plan.block_tokens, plan.page_tokens) == (32, 32)
    assert (plan.tp, plan.dp, plan.faults) == (3, 2, "fail=rank1:0.1")
    assert plan.tiers == {"disk": {"directory": str(tmp_path / "kv")}}
    assert plan.model.folder == str(model)


def test_the_own_engine_is_what_runs_otherwise(started: type[StartedJob], tmp_path: Path) -> None:
    assert launch.main(["--model", "random:tiny", "--device", "cpu"]) == 1
    assert started.command[-3:-1] == ["-m", "mlkv.engine.job"]
    assert started.plan.engine == "builtin"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "4"], "tp: in vLLM every rank has as many heads; 4 ranks cannot share 6 query"),
        (["--device", "cuda"], "is built for cpu, not cuda"),
        (["--model", "/no/such/folder"], "model: there is no folder /no/such/folder"),
    ],
)
def test_what_does_not_fit_model_or_machine_ends_before_a_rank_is_started(
    arguments: list[str],
    message: str,
    started: type[StartedJob],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make_model(tmp_path / "model")
    assert launch.main(["--engine", "vllm", "--model", str(model), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_shared_memory_of_killed_ranks_is_removed_and_that_of_others_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_vllm, "_SHARED_MEMORY", tmp_path)
    earlier, left, in_use = (tmp_path / f"-tp:0-[{ranks}]-cpushm_0" for ranks in ("0-1", "0-1-2", "0"))
    earlier.touch()
    in_use.write_bytes(bytes(mmap.PAGESIZE))
    with open(in_use, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        in_use.rename(tmp_path / "moved")
        with on_vllm.no_shared_memory_left():
            left.touch()
            (tmp_path / "moved").rename(in_use)
            (tmp_path / "psm_of_others").touch()
    assert {path.name for path in tmp_path.iterdir()} == {earlier.name, in_use.name, "psm_of_others"}


# -- launch.sh: which Python runs the job ------------------------------------------------------------------------


def fake_python(path: Path, *, has_vllm: bool) -> Path:
    """A program that passes for a Python with everything that mlkv needs, and says that it was run."""
    path.parent.mkdir(parents=True)
    path.write_text(
        "#!/usr/bin/env bash\n"
        f'case "$1" in -c) exit {0 if has_vllm else 1} ;; *check_env.py) exit 0 ;; esac\n'
        f'echo "{path} $*"\n'
    )
    path.chmod(0o755)
    return path


def run_launch(tmp_path: Path, python: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHON": str(python), "MLKV_HOME": str(tmp_path / "home")}
    environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(
        [str(ROOT / "launch.sh"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("asked", [["--engine", "vllm"], ["--engine=vllm"]])
def test_launch_takes_the_given_python_if_it_has_vllm(asked: list[str], tmp_path: Path) -> None:
    python = fake_python(tmp_path / "given" / "python", has_vllm=True)
    assert run_launch(tmp_path, python, *asked) == f"{python} -m mlkv.engine.launch {' '.join(asked)}"


def test_launch_takes_the_environment_made_for_vllm_otherwise(tmp_path: Path) -> None:
    given = fake_python(tmp_path / "given" / "python", has_vllm=False)
    venv = tmp_path / "home" / "vllm-venv"
    made = fake_python(venv / "bin" / "python", has_vllm=True)
    shutil.copy(ROOT / "scripts" / "vllm-constraints.txt", venv / "made-from")
    assert run_launch(tmp_path, given, "--engine", "vllm").startswith(f"{made} -m mlkv.engine.launch")
    # Neither without the option, nor when it is an argument of a script.
    assert run_launch(tmp_path, given).startswith(f"{given} -m mlkv.engine.launch")
    assert run_launch(tmp_path, given, "--", "script", "--engine", "vllm").startswith(f"{given} -m")
