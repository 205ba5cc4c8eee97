"""Start the owner process of a host as nobody's child."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from mlkv.errors import ConfigError, DeadlineExceeded, StoreError
from mlkv.store.rendezvous import SocketLock
from mlkv.store.settings import OwnerSettings

READY = b"ready"
CONFIG_ERROR = b"config:"
"""What the owner writes to the pipe of its starter: ready, or why not (a ConfigError if it begins like this)."""

_MAX_ANSWER_BYTES = 65536

_THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def spawn_owner(settings: OwnerSettings, lock: SocketLock, deadline_s: float) -> None:
    """Start an owner and wait until it listens. The caller holds `lock`; the owner shares it until it listens.

    Raises ConfigError for settings that the owner refuses (a pool larger than memory), StoreError if it does
    not start, DeadlineExceeded if it does not get ready in time; it is killed then.
    """
    if not sys.executable:
        raise ConfigError("this Python does not know its own executable; start the store by hand with --keep")
    settings_fd = settings.to_fd()
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    # The path is in the settings too; here it is for people who look at the list of processes.
    argv = [f"--socket={settings.socket_path}", f"--settings-fd={settings_fd}"]
    argv += [f"--lock-fd={lock.fileno()}", f"--ready-fd={ready_write}"]
    try:
        try:
            # The child detaches (see owner.main), so what is waited for here ends at once and leaves no zombie.
            process = subprocess.Popen(
                [sys.executable, "-m", "mlkv.store.owner", *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(settings_fd, lock.fileno(), ready_write),
                start_new_session=True,
                cwd="/",
                env=owner_environment(),
            )
        except OSError as error:
            raise StoreError(f"cannot start the owner of the store: {error.strerror}") from error
        finally:
            os.close(settings_fd)
            os.close(ready_write)
        answer = _read_answer(ready_read, process, deadline_s)
    finally:
        os.close(ready_read)
    if answer == READY:
        return
    if answer.startswith(CONFIG_ERROR):
        raise ConfigError(answer.removeprefix(CONFIG_ERROR).decode(errors="replace"))
    raise StoreError(
        "the owner of the store did not start: "
        + (answer.decode(errors="replace") or f"it died; see {settings.log_file or 'standard error'}")
    )


def _read_answer(ready_fd: int, process: subprocess.Popen[bytes], deadline_s: float) -> bytes:
    """All that the owner writes to its pipe before it closes it."""
    give_up_at = time.monotonic() + deadline_s
    answer = b""
    poll = select.poll()
    poll.register(ready_fd, select.POLLIN)
    while len(answer) < _MAX_ANSWER_BYTES:
        if not poll.poll(max(0.0, give_up_at - time.monotonic()) * 1000):
            _kill_session(process)
            raise DeadlineExceeded(f"the owner of the store was not ready within {deadline_s:.1f} s")
        data = os.read(ready_fd, _MAX_ANSWER_BYTES)
        if not data:
            break
        answer += data
    process.wait()  # it held the pipe too, so it has ended
    return answer


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """End the child and what it has forked: it leads a session of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing of it is left
    finally:
        process.wait()


def owner_environment() -> dict[str, str]:
    """Ours, with the same import path however it came about, one thread, and no GPU."""
    environment = dict(os.environ)
    paths: Sequence[str] = [os.path.abspath(entry) for entry in sys.path]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    for name in _THREAD_SETTINGS:
        environment[name] = "1"
    return environment
