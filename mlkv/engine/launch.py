"""The main job as a person starts it: check everything, start the ranks, watch them, report.

python -m mlkv.engine.launch --help
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mlkv.engine import options as command_line
from mlkv.engine.options import PROGRAM, Options
from mlkv.engine.processes import (
    Interrupted,
    Job,
    check_port,
    interruptible,
    killed_rank,
    rank_environment,
    torchrun_command,
)
from mlkv.errors import AgreementError, ConfigError, MLKVError

if TYPE_CHECKING:
    from mlkv.engine.plan import JobPlan, RankError

LINE_COLUMNS = 110
"""Of the report where there is no terminal that says how wide it is."""

_RANK_MODULES = {"builtin": "mlkv.engine.job", "vllm": "mlkv.integrations.vllm.job"}
"""What each rank runs, by the engine that serves the model."""

_MAX_SOCKET_FOLDER_BYTES = 80
"""A Unix socket's path holds 107 bytes, and the socket's name needs some of them."""


def home() -> Path:
    """Folder that keeps models between runs."""
    return Path(os.environ.get("MLKV_HOME") or "~/.cache/mlkv").expanduser()


class JobFailed(MLKVError):
    """A rank ended early; the message says which, why, and where its log is."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    interruptible()
    console = Console()
    if not console.is_terminal:
        console = Console(width=LINE_COLUMNS)
    try:
        options = command_line.parse(sys.argv[1:] if argv is None else argv)
        if options.script:
            return run_script(options)
        return run_main_job(options, console)
    except ConfigError as error:
        return _end(2, f"error: {error}")
    except MLKVError as error:
        return _end(1, f"error: {error}")
    except Interrupted as error:
        return _end(128 + error.signum, f"ended by {error}")


def _end(status: int, message: str) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return status


def run_script(options: Options) -> int:
    """Run a person's own script under torchrun; its exit status."""
    num_ranks = options.tp * options.dp
    if options.port is not None:
        check_port(options.port)
    command = torchrun_command(num_ranks, options.port, options.script, max_restarts=options.max_restarts)
    with Job(command, rank_environment(num_ranks), reap=False) as job:
        return job.wait(lambda: None)


def run_main_job(options: Options, console: Console) -> int:
    """Raises ConfigError, JobFailed, Interrupted; nothing of the job is left then either."""
    if options.json is not None:
        _check_writable(options.json)
    if options.port is not None:
        check_port(options.port)
    with ExitStack() as stack:
        folder = _run_folder(stack)
        plan = _plan(options, folder, console)
        if plan.engine == "vllm":
            from mlkv.engine.on_vllm import no_shared_memory_left

            stack.enter_context(no_shared_memory_left())
        report = _run(plan, options, console)
    from mlkv.engine.report import print_report

    print_report(console, report)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return 0 if all(report["audits"].values()) else 1


def _check_writable(path: Path) -> None:
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(f"json: {path} cannot be written")


def _run_folder(stack: ExitStack) -> Path:
    """A private folder for sockets, results and logs, removed at the end whatever happens."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if not os.access(base, os.W_OK) or len(os.fsencode(base)) > _MAX_SOCKET_FOLDER_BYTES:
        base = "/tmp"
    folder = Path(tempfile.mkdtemp(prefix="mlkv-job-", dir=base))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _plan(options: Options, folder: Path, console: Console) -> JobPlan:
    """Everything that can be wrong is found here, before a rank is started."""
    with console.status("importing torch and transformers"):
        from mlkv.engine.planning import make_plan
    with console.status("preparing the model") as status:

        def progress(message: str) -> None:
            status.update(message)
            if not console.is_terminal:
                console.print(message, markup=False, highlight=False)

        return make_plan(options, folder, home(), progress)


def _run(plan: JobPlan, options: Options, console: Console) -> dict[str, Any]:
    """Start the ranks, follow them, and put together what they report."""
    from mlkv.engine import plan as files
    from mlkv.engine.audits import run_audits
    from mlkv.engine.report import ProgressView, summarise

    folder = Path(plan.run_folder)
    files.write(plan, folder / "plan.json")
    num_ranks = plan.tp * plan.dp
    target = ["-m", _RANK_MODULES[plan.engine], str(folder / "plan.json")]
    log_path = folder / "ranks.log"
    command = torchrun_command(num_ranks, options.port, target, max_restarts=options.max_restarts)
    with (
        open(log_path, "wb") as log,
        Job(command, rank_environment(num_ranks), log=log) as job,
        ProgressView(console, plan) as view,
    ):
        status = job.wait(view.update)
    folder = files.newest_start(folder)
    if status != 0:
        _explain(status, files.read_all(folder, "error*.json", files.RankError), log_path)
    replicas = files.read_all(folder, "replica*.json", files.ReplicaResult)
    ranks = sorted(files.read_all(folder, "rank*.json", files.RankResult), key=lambda result: result.rank)
    return summarise(plan, replicas, ranks, run_audits(plan, replicas, ranks))


def _explain(status: int, errors: list[RankError], log_path: Path) -> None:
    """Raise the error that says best why the ranks ended."""
    for error in sorted(errors, key=lambda e: e.at):
        if error.kind == ConfigError.__name__:
            raise ConfigError(error.message)
    log = log_path.read_text(errors="replace")
    reason = killed_rank(log)
    if not reason and errors:
        # What ranks say when another one is gone is worth less than what that one said.
        consequences = {kind.__name__ for kind in AgreementError.__subclasses__()}
        first = min(errors, key=lambda e: (e.kind in consequences, not e.expected, e.at))
        reason = f"rank {first.rank}: {first.message if first.expected else f'{first.kind}: {first.message}'}"
    if not reason:  # before a rank could say it in its own words
        found = re.search(r"^(?:\w+\.)*\w*(?:Error|Exception): .*$", log, re.MULTILINE)
        reason = found[0] if found else f"torchrun ended with status {status}"
    kept = home() / "logs" / f"job-{os.getpid()}.log"
    where = ""
    with suppress(OSError):  # the message is worth more than the log
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log_path, kept)
        where = f"; the log of the ranks is {kept}"
    raise JobFailed(f"{reason}{where}")


if __name__ == "__main__":
    sys.exit(main())
