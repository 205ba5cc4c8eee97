"""Each kind of bad input ends in one clear line and status 2, before any rank is started."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlkv.engine import launch
from mlkv.engine.processes import Job, torchrun_command
from tests.job.jobs import TINY, assert_nothing_left


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The job's folder; no rank may be started, and the handlers of pytest come back."""
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("MLKV_HOME", str(runtime / "home"))

    def refuse(self: Job) -> Job:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(Job, "__enter__", refuse)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield runtime
    for number, handler in handlers.items():
        signal.signal(number, handler)


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    """The one line that a person sees."""
    assert launch.main([*TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("launch.sh: error: ")
    assert_nothing_left(folder)
    return error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/folder"], "model: there is no folder /no/such/folder"),
        (["--model", "random:huge"], "random:huge is not known; there are random:tiny, random:1b, random:8b"),
        (["--tp", "7"], "7 ranks are more than the 6 query heads of the model; tp values that work: 1 to 6"),
        (["--tp", "0"], "--tp: must be a whole number of at least 1, not '0'"),
        (["--page-size", "24"], "24 tokens are not a multiple of the device pool's block of 16 tokens"),
        (["--host-cache", "1KiB"], "host-cache: 1024 bytes are less than one page of"),
        (["--host-cache", "much"], "must be a size such as 512MiB or 8GiB, not 'much'"),
        (["--device-cache", "20KiB"], "device-cache: 20480 bytes hold"),
        (["--prompts", "/no/prompts"], "prompts: cannot read /no/prompts: No such file or directory"),
        (["--faults", "delay=rank1:soon"], "faults: 'delay=rank1:soon'"),
        (["--json", "/no/such/report.json"], "json: /no/such/report.json cannot be written"),
        (["--device", "cuda"], "2 ranks (tp=2 times dp=1) need as many GPUs, there are 0"),
        (["--dp", "40"], "dp: there are documents for 26 replicas at most"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--", "/no/script.py"], "there is no script /no/script.py"),
        (["--"], "nothing follows --"),
        (["--", __file__], "--model is not for scripts of yours; --tp, --dp, --port, --max-restarts are"),
    ],
)
def test_wrong_options_are_refused_by_name(
    arguments: list[str],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert message in refusal(capsys, folder, *arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n  \n", "is empty"),
        (b'fine\n{"prompt": "fine"}\n{"prompt": \n', "line 3: malformed JSON"),
        (b'{"prompt": ""}', 'line 1: "prompt" must be text that is not empty'),
        (b'{"prompt": 5}', 'line 1: "prompt" must be text that is not empty'),
        (b'\n{"text": "x"}', 'line 2: expected one key, "prompt" or "messages"; found [\'text\']'),
        (b'{"messages": []}', 'line 1: "messages" must be a list that is not empty'),
        (b'{"messages": [{"role": "boss", "content": "x"}]}', "line 1: message 1 must be an object with role"),
        (b'{"messages": [{"role": "assistant", "content": "x"}]}', "line 1: the last message is the assistant's"),
        (b"fine\n\xff\xfe\n", "line 2: not valid UTF-8"),
        (b"fine\n" + b"word " * 900, "line 2: the prompt has 4519 tokens; the model's context of 4096 leaves"),
    ],
)
def test_wrong_prompts_are_refused_by_line(
    content: bytes, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(content)
    error = refusal(capsys, folder, "--prompts", str(prompts))
    assert str(prompts) in error
    assert message in error


def test_fewer_prompts_than_replicas_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("only one\n")
    assert "holds 1 prompts for dp=2 replicas" in refusal(capsys, folder, "--prompts", str(prompts), "--dp", "2")


def test_a_folder_without_a_model_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    error = refusal(capsys, folder, "--model", str(tmp_path / "empty"))
    assert "is not a model folder" in error


def test_a_port_that_is_taken_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port: {port} cannot be used: Address already in use" in refusal(
            capsys, folder, "--port", str(port)
        )


def test_a_wrong_environment_variable_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLKV_HOST_BYTES", "1GiB")
    assert "environment variable MLKV_HOST_BYTES is not a setting" in refusal(capsys, folder)


def test_a_given_port_is_the_rendezvous() -> None:
    assert "--master-port=4711" in torchrun_command(2, 4711, ["script.py"])
