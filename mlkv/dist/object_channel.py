"""The portable reference channel: point-to-point reports and `broadcast_object_list`, over Gloo."""

from __future__ import annotations

import datetime
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mlkv.dist.channel import Channel, Decider
from mlkv.dist.protocol import REPORT_BYTES
from mlkv.dist.replica import Replica
from mlkv.dist.verdict import Verdicts
from mlkv.errors import RankLost

_TAG = 0x6D6C  # reports of followers; the group carries nothing else point to point
_WORDS = 1 + REPORT_BYTES // 8


class ObjectChannel(Channel):
    """Each follower sends its step and report to the master; the master broadcasts one object to all.

    Reports are received one by one rather than by a gather, because a failing receive names its sender. The
    object is a `bytes`; unpickling it is confined to this trusted group.
    """

    name = "object"

    def __init__(self, replica: Replica) -> None:
        if replica.group is None:
            raise AssertionError("a replica of one rank needs no group")
        self._replica = replica
        self._group = replica.group
        self._verdicts = Verdicts(replica, range(replica.size))

    def exchange(self, step: int, report: bytes, decider: Decider) -> bytes:
        if not self._replica.is_master:
            self._report(step, report)
            return self._receive(step)
        steps, reports = self._collect(step, report)
        message = b""
        for rank, reached in enumerate(steps):
            if reached != step:
                message = decider.refuse(step, rank, f"it is at step {reached}, the master at {step}")
        if not message:
            message = decider.decide(step, reports)
        self._send(step, message)
        return message

    def _report(self, step: int, report: bytes) -> None:
        words = np.frombuffer(step.to_bytes(8, "little") + report, np.int64).copy()
        try:
            dist.send(torch.from_numpy(words), group=self._group, group_dst=0, tag=_TAG)
        except RuntimeError as error:
            raise self._verdicts.conclude(step, 0, f"it took no report: {error}") from error

    def _collect(self, step: int, report: bytes) -> tuple[list[int], list[bytes]]:
        deadline = time.monotonic() + self._replica.deadline_s
        rows = np.empty((self._replica.size, _WORDS), np.int64)
        missing = 1
        try:
            waiting: list[Any] = []
            for rank in range(1, self._replica.size):
                missing = rank
                row = torch.from_numpy(rows[rank])
                waiting.append(dist.irecv(row, group=self._group, group_src=rank, tag=_TAG))
            for rank, work in enumerate(waiting, start=1):
                missing = rank
                left_s = max(0.001, deadline - time.monotonic())
                work.wait(datetime.timedelta(seconds=left_s))
        except RuntimeError as error:
            why = f"no report within {self._replica.deadline_s:g} s or its connection broke ({error})"
            raise self._verdicts.conclude(step, missing, why) from error
        return [step, *map(int, rows[1:, 0])], [report, *(row[1:].tobytes() for row in rows[1:])]

    def _send(self, step: int, message: bytes) -> None:
        try:
            dist.broadcast_object_list([message], group=self._group, group_src=0)
        except RuntimeError as error:
            why = f"the decision could not be delivered ({error})"
            raise self._verdicts.conclude(step, self._replica.size - 1, why) from error

    def _receive(self, step: int) -> bytes:
        box: list[Any] = [None]
        try:
            dist.broadcast_object_list(box, group=self._group, group_src=0)
        except RuntimeError as error:
            why = f"no decision within {self._replica.deadline_s:g} s or its connection broke ({error})"
            raise self._verdicts.conclude(step, 0, why) from error
        if not isinstance(box[0], bytes):
            raise self._verdicts.conclude(step, 0, f"its decision is a {type(box[0]).__name__}")
        return box[0]

    def leave(self, why: str, lost: RankLost | None) -> None:
        self._verdicts.post(lost or RankLost(self._replica.rank, 0, why))

    def close(self) -> None:
        """The group belongs to the replica; nothing of it is released here."""
        self._verdicts.close()
