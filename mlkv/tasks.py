"""What the facade keeps for a load and for an offload, and what a step tells the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Hit:
    """Answer to a lookup. `num_tokens`: length of the cached prefix worth loading, whole pages, 0 for none.

    `start`: the first token that `load` wants a slot for; tokens before it are on the device already.
    """

    num_tokens: int
    start: int = 0


@dataclass(frozen=True)
class Failure:
    """A load or offload that did not complete on every rank.

    Attributes:
        num_tokens: for a load, tokens from the front that are valid on the device of every rank; for an
            offload, tokens from the front that are readable in the cache.
        reason: what happened, and on which rank where that is known.
    """

    num_tokens: int
    reason: str


@dataclass(frozen=True)
class StepResult:
    """What one step agreed; identical on every rank of the replica. Keys and entries are request ids.

    Only to be read: steps that have nothing to tell share one.

    Attributes:
        hits: answered lookups.
        loaded: complete loads, with the number of tokens now valid on the device.
        failed: loads that failed on some rank; the rest of the prompt is to be computed.
        released: requests whose device slots no transfer reads or writes any more: after the gather of an
            offload, or after `abort`.
        offloaded: complete offloads, with the number of tokens from the front readable by everybody.
        unstored: offloads that failed on some rank, for information.
    """

    hits: dict[str, Hit] = field(default_factory=dict)
    loaded: dict[str, int] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    offloaded: dict[str, int] = field(default_factory=dict)
    unstored: dict[str, Failure] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether the step has anything to tell."""
        return bool(self.hits or self.loaded or self.failed or self.released or self.offloaded or self.unstored)


NOTHING_TOLD = StepResult()
"""Of an idle step: making a new one would be a fifth of the step's cost."""


class LoadStatus(Enum):
    ASKED = auto()  # lookup sent, no answer agreed yet
    HIT = auto()  # answered; its pages are leased until load, decline or abort
    LOADING = auto()  # numbered in the stream of loads, copying somewhere


class OffloadStatus(Enum):
    ASKED = auto()  # pages are being reserved
    COPYING = auto()  # numbered in the stream of offloads; slots still read somewhere
    STORING = auto()  # released everywhere; bytes still on their way to host pages
    COMMITTING = auto()  # complete on every rank; the owner is making the pages readable


@dataclass
class LoadTask:
    """A lookup and the load that may follow from it."""

    request_id: str
    call: int
    keys: bytes
    device_tokens: int
    first_page: int
    status: LoadStatus = LoadStatus.ASKED
    is_stale: bool = False  # the namespace was invalidated since it began
    num_pages: int = 0  # of the hit, from the root
    indices: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    generations: npt.NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))


@dataclass
class OffloadTask:
    """The way of a request's whole pages into the store."""

    request_id: str
    call: int
    keys: bytes
    root: bytes
    slots: torch.Tensor | None  # int64 [num_pages * page_tokens]; dropped once the transfer has them
    status: OffloadStatus = OffloadStatus.ASKED
    is_stale: bool = False  # the namespace was invalidated since it began
    num_pages_moved: int = 0
    failure: str = ""
    aborted: bool = False


@dataclass
class CacheStats:
    """Counters of one rank since its cache was made. Monotone. Bytes are those of this rank's heads."""

    lookups: int = 0
    hits: int = 0
    hit_tokens: int = 0
    loaded_pages: int = 0
    loaded_bytes: int = 0
    loaded_pages_by_tier: dict[str, int] = field(default_factory=dict)
    """Of the loaded pages, those that each lower tier brought for their lookup; the others were in host memory.
    Only the master of a replica knows."""
    offloaded_pages: int = 0
    offloaded_bytes: int = 0
    failed_loads: int = 0
    failed_offloads: int = 0
    steps: int = 0
    agree_us: dict[str, float] = field(default_factory=dict)
    channel: str = ""
    cooperative: bool = False  # whether large loads come in parts over the links of several ranks
