"""The portable reference channel: point-to-point reports and `broadcast_object_list`, over Gloo."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mlkv.dist.channel import Channel, Decide
from mlkv.dist.protocol import Progress, Words
from mlkv.dist.replica import Replica
from mlkv.dist.verdict import Verdicts

_TAG = 0x6D6C  # reports of followers; the group carries nothing else point to point


class ObjectChannel(Channel):
    """Each follower sends its words to the master; the master broadcasts one object to all.

    Reports are received one by one rather than by a gather, because a failing receive names its sender. The
    object is a `bytes`; unpickling it is confined to this trusted group.
    """

    name = "object"

    def __init__(self, replica: Replica) -> None:
        if replica.group is None:
            raise AssertionError("a replica of one rank needs no group")
        self._replica = replica
        self._group = replica.group
        self._verdicts = Verdicts(replica)
        self._step = 0

    def exchange(self, words: Words, decide: Decide | None) -> bytes:
        self._step += 1
        if decide is None:
            self._report(words)
            return self._receive()
        message = decide(self._collect(words))
        self._send(message)
        return message

    def _report(self, words: Words) -> None:
        try:
            dist.send(torch.from_numpy(words), group=self._group, group_dst=0, tag=_TAG)
        except RuntimeError as error:
            raise self._verdicts.conclude(self._step, 0, f"it took no report: {error}") from error

    def _collect(self, words: Words) -> Sequence[Words]:
        deadline = time.monotonic() + self._replica.deadline_s
        reports = [words]
        reports += [np.empty(Progress.WORDS, np.int64) for _ in range(self._replica.size - 1)]
        missing = 1
        try:
            waiting: list[Any] = []
            for rank in range(1, self._replica.size):
                missing = rank
                buffer = torch.from_numpy(reports[rank])
                waiting.append(dist.irecv(buffer, group=self._group, group_src=rank, tag=_TAG))
            for rank, work in enumerate(waiting, start=1):
                missing = rank
                left_s = max(0.001, deadline - time.monotonic())
                work.wait(datetime.timedelta(seconds=left_s))
        except RuntimeError as error:
            why = f"no report within {self._replica.deadline_s:g} s or its connection broke ({error})"
            raise self._verdicts.conclude(self._step, missing, why) from error
        return reports

    def _send(self, message: bytes) -> None:
        try:
            dist.broadcast_object_list([message], group=self._group, group_src=0)
        except RuntimeError as error:
            why = f"the decision could not be delivered ({error})"
            raise self._verdicts.conclude(self._step, self._replica.size - 1, why) from error

    def _receive(self) -> bytes:
        box: list[Any] = [None]
        try:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        except RuntimeError as error:
            why = f"no decision within {self._replica.deadline_s:g} s or its connection broke ({error})"
            raise self._verdicts.conclude(self._step, 0, why) from error
        if not isinstance(box[0], bytes):
            raise self._verdicts.conclude(self._step, 0, f"its decision is a {type(box[0]).__name__}")
        return box[0]

    def close(self) -> None:
        """The group belongs to the replica; nothing of it is released here."""
