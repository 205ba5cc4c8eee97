"""What the launcher decides once and every rank reads, and what ranks write back: files of one run folder.

Replicas never meet in a collective, so results, progress and errors travel as files. Each is written under
another name first, so that a reader sees all of it or nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mlkv.engine.source import PreparedModel
from mlkv.engine.workload import Ask
from mlkv.errors import DeadlineExceeded, MLKVError

_POLL_S = 0.02

_Record = TypeVar("_Record", bound=msgspec.Struct)


class Model(msgspec.Struct, frozen=True):
    """A `PreparedModel` in a file."""

    name: str
    digest: str
    folder: str | None
    shape: str
    seed: int

    @classmethod
    def of(cls, prepared: PreparedModel) -> Model:
        folder = None if prepared.folder is None else str(prepared.folder)
        return cls(prepared.name, prepared.digest, folder, prepared.shape, prepared.seed)

    def prepared(self) -> PreparedModel:
        folder = None if self.folder is None else Path(self.folder)
        return PreparedModel(self.name, self.digest, folder, self.shape, self.seed)


class JobPlan(msgspec.Struct, frozen=True):
    """One main job.

    Attributes:
        engine: "builtin" or "vllm", see `mlkv.engine.options.ENGINES`.
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16" or "float16".
        pool_pages: pages of the device pool on each rank.
        asks: for each replica its requests, in order of arrival.
        concurrency: requests of a replica in flight at once.
        max_batch_tokens: tokens computed in a step; noise_batch_tokens: in the run that measures noise.
        faults: fault plan of the cache, see `mlkv.faults`.
        deadline_s: how long a rank waits for another in a step of the cache, as `agree.deadline_s`.
        tiers: settings of `StoreConfig` that name what lies below the host cache; no secrets.
    """

    run_folder: str
    model: Model
    tp: int
    dp: int
    device: str
    dtype: str
    page_tokens: int
    block_tokens: int
    pool_pages: int
    host_bytes: int
    asks: list[list[Ask]]
    concurrency: int
    max_new_tokens: int
    max_batch_tokens: int
    noise_batch_tokens: int
    faults: str
    engine: str = "builtin"
    deadline_s: float = 60.0
    tiers: dict[str, Any] = {}

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def exact(self) -> bool:
        """Whether outputs must be equal token for token: in fp32, where chunking does not change choices."""
        return self.dtype == "float32"

    @property
    def phases(self) -> tuple[str, ...]:
        """The runs of the workload, in order."""
        return ("off", "on") if self.exact else ("off", "noise", "on")


class Served(msgspec.Struct, frozen=True):
    """One answered request. `ttft_s` is from its submission to its first token."""

    request_id: str
    prompt_tokens: int
    computed_tokens: int
    device_tokens: int
    host_tokens: int
    ttft_s: float
    total_s: float
    answer: list[int]
    text: str = ""


class LogitNoise(msgspec.Struct, frozen=True):
    """Teacher-forced logits of one run compared with those of the first cache-off run.

    Attributes:
        max_abs: largest difference of any logit; max_logit: largest logit met, which gives differences a scale.
        tokens: compared; flipped: of them those whose largest logit is another token's.
    """

    max_abs: float
    max_logit: float
    tokens: int
    flipped: int


class StoreAudit(msgspec.Struct, frozen=True):
    """The store's books when nothing is in flight any more."""

    num_pages: int
    free: int
    reserved: int
    ready: int
    quarantined: int
    leases: int
    reservations: int
    problem: str

    @classmethod
    def unknown(cls, problem: str) -> StoreAudit:
        """Where nobody could count."""
        return cls(0, 0, 0, 0, 0, 0, 0, problem)

    @property
    def conserved(self) -> bool:
        held = self.reserved, self.quarantined, self.leases, self.reservations
        return not self.problem and not any(held) and self.free + self.ready == self.num_pages


class ReplicaResult(msgspec.Struct, frozen=True):
    """What the master of a replica reports. `noise` by phase, in lower precision only."""

    replica: int
    served: dict[str, list[Served]]
    seconds: dict[str, float]
    noise: dict[str, LogitNoise]
    audit: StoreAudit
    device_problem: str


class RankResult(msgspec.Struct, frozen=True):
    """What every rank reports. Equal digests mean: all `step` results, and all outputs, were the same."""

    rank: int
    results_digest: str
    outputs_digest: str
    steps: int
    loaded_pages: int
    loaded_bytes: int
    loaded_pages_by_tier: dict[str, int]
    offloaded_pages: int
    offloaded_bytes: int
    failed_loads: int
    failed_offloads: int
    agree_us: dict[str, float]
    channel: str


class CheckedIn(msgspec.Struct, frozen=True):
    """A rank has started, as this process."""

    rank: int
    pid: int


class RankError(msgspec.Struct, frozen=True):
    """Why a rank ended early.

    Attributes:
        expected: an error of ours, whose message says all.
        lost: the global rank that it found to be lost; -1 when that is not the reason.
    """

    rank: int
    at: float
    kind: str
    message: str
    expected: bool
    trace: str
    lost: int = -1


class Progress(msgspec.Struct, frozen=True):
    """How far a replica is: `done` of `total` requests of `phase`."""

    phase: str
    done: int
    total: int


def start_folder(run_folder: Path) -> Path:
    """Where the ranks of this start of the job write: torchrun may start them again (`--max-restarts`).

    What an earlier start has left must not be taken for a word of this one.
    """
    return run_folder / f"start{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def newest_start(run_folder: Path) -> Path:
    """The folder of the newest start, for the launcher."""
    return max(run_folder.glob("start*"), key=lambda folder: int(folder.name[5:]), default=run_folder / "start0")


def write(record: msgspec.Struct, path: Path) -> None:
    """Write a record as JSON, in one step."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_bytes(msgspec.json.encode(record))
    scratch.replace(path)


def read(path: Path, kind: type[_Record]) -> _Record:
    """Raises MLKVError when the file is absent or not such a record."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise MLKVError(f"{path.name} of the run cannot be read: {error}") from None


def read_all(folder: Path, pattern: str, kind: type[_Record]) -> list[_Record]:
    """All records of that name, in the order of their names."""
    return [read(path, kind) for path in sorted(folder.glob(pattern))]


def wait_for(paths: list[Path], deadline_s: float) -> None:
    """Until all files are there. Raises DeadlineExceeded."""
    give_up_at = time.monotonic() + deadline_s
    while missing := [path.name for path in paths if not path.exists()]:
        if time.monotonic() > give_up_at:
            raise DeadlineExceeded(f"{', '.join(missing)} did not appear within {deadline_s:.0f} s")
        time.sleep(_POLL_S)
