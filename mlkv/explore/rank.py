"""One rank: the real member and lifecycle over transfers that end when the explorer says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import torch

from mlkv.dist import NOTHING_AGREED, Agreed, Decision, Mark, Member, Stream
from mlkv.dist.explore import Violation
from mlkv.errors import AgreementError
from mlkv.explore.store import Touch, VirtualStore, Written, describe_content
from mlkv.explore.words import PAGE_TOKENS, keys_of, root, split, text_of
from mlkv.kernels import PageBatch
from mlkv.layout import RankSlice
from mlkv.tasks import StepResult

if TYPE_CHECKING:
    from mlkv.explore.parts import Shape
    from mlkv.planner import Planner


Call = tuple[object, ...]
"""What an engine does between two steps: ("lookup", id, text, device_tokens), ("load", id, blocks), ..."""


class NamedMember(Member):
    """A member that remembers whose its newest entry is: transfers are named after requests in stories."""

    newest_label = ""

    def record(self, stream: Stream, identity: bytes, label: str) -> int:
        self.newest_label = label
        return super().record(stream, identity, label)


@dataclass
class Transfer:
    """A copy in flight on one rank.

    Attributes:
        blocks: device blocks, one a page.
        gathered: what an offload has read from its blocks, once it has.
    """

    touch: Touch
    number: int
    pages: list[int]
    wanted: list[Written]
    blocks: list[int]
    gathered: list[bytes | None] | None = None


@dataclass
class Completion:
    mark: Mark
    number: int
    num_good: int | None = None


@dataclass
class Ended:
    """Why a rank takes no further part."""

    error: AgreementError | None = None
    killed: bool = False
    gone: bool = False  # its process has ended, or it took leave: it touches nothing any more


class VirtualRank:
    """Attributes:
    number, group_rank: of all ranks, and within its replica.
    device: what each device block holds: the key of its page, if it holds a whole page's KV.
    transfers: in flight here, by (kind, number).
    """

    def __init__(
        self,
        number: int,
        group_rank: int,
        shape: Shape,
        store: VirtualStore,
        group: bytes,
        planner: Planner | None,
    ) -> None:
        self.number = number
        self.group_rank = group_rank
        self.store = store
        self._group = group
        self._asks = planner is not None
        self.member = shape.parts.member(group_rank, late=shape.is_late)
        self.lifecycle = shape.parts.lifecycle(
            shape.layout,
            RankSlice.of_rank(shape.layout.num_kv_heads, shape.num_ranks, group_rank),
            self.member,
            self,
            planner,
            min_load_tokens=1,
            max_tasks=shape.max_tasks,
        )
        self.device: dict[int, bytes | None] = {}
        self.transfers: dict[tuple[str, int], Transfer] = {}
        self.ended: Ended | None = None
        self._completions: list[Completion] = []
        self._block_touches: dict[int, Touch] = {}
        self._reading: dict[int, list[Written]] = {}  # what each load reads, until all have read it

    def describe_state(self, where: str) -> str:
        if self.ended is None:
            return where
        if self.ended.gone:
            return "is gone"
        return "is dying" if self.ended.killed else "has ended"

    @property
    def is_running(self) -> bool:
        return self.ended is None

    # What the engine does

    def make_calls(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self._make_call(call)

    def _make_call(self, call: Call) -> None:
        match call:
            case ("lookup", str(request_id), str(text), int(device_tokens)):
                # As the facade does it: the last token has to be computed.
                keys = keys_of(text, max(0, len(text.split()) - 1))
                self.lifecycle.lookup(request_id, keys, device_tokens)
            case ("load", str(request_id), list(slots)):
                self.lifecycle.load(request_id, torch.tensor(slots, dtype=torch.int64))
            case ("decline", str(request_id)):
                self.lifecycle.decline(request_id)
            case ("offload", str(request_id), str(text), list(slots)):
                keys = keys_of(text)
                whole = len(split(keys)) * PAGE_TOKENS
                self.lifecycle.offload(request_id, keys, root(), torch.tensor(slots[:whole], dtype=torch.int64))
            case ("abort", str(request_id)):
                self.lifecycle.abort(request_id)
            case ("clear",):
                self.lifecycle.clear()
            case ("compute", str(request_id), list(blocks)):
                self._compute(request_id, blocks)
            case _:
                raise AssertionError(f"no such call: {call}")

    def _compute(self, request_id: str, blocks: list[tuple[int, bytes | None]]) -> None:
        for block, key in blocks:
            self._check_untouched(block, f"computes {request_id} into it")
            self.device[block] = key

    def _check_untouched(self, block: int, purpose: str) -> None:
        touch = self._block_touches.get(block)
        if touch is not None:
            raise Violation(
                "no device slot is reused while a transfer touches it",
                f"the engine of rank {self.number} {purpose}: block {block}, which the {touch.kind} of "
                f"{touch.request_id} still uses",
            )

    # StartsTransfers

    def load(self, number: int, pages: PageBatch, slots: torch.Tensor) -> None:
        self._start("load", number, pages, slots)

    def offload(self, number: int, pages: PageBatch, slots: torch.Tensor) -> None:
        self._start("offload", number, pages, slots)

    def _start(self, kind: str, number: int, pages: PageBatch, slots: torch.Tensor) -> None:
        # The first token of a page may be on the device already (-1), its last one never is.
        blocks = [slot // PAGE_TOKENS for slot in slots.tolist()[PAGE_TOKENS - 1 :: PAGE_TOKENS]]
        touch = Touch(self.number, kind, self.member.newest_label)
        generations = pages.generations.tolist()
        wanted = [Written(*pair) for pair in zip(split(pages.keys), generations, strict=True)]
        transfer = Transfer(touch, number, pages.indices.tolist(), wanted, blocks)
        for page in transfer.pages:
            self.store.start_touching(page, touch)
        for block in blocks:
            self._check_untouched(block, f"starts the {kind} of {touch.request_id}")
            self._block_touches[block] = touch
        self.transfers[kind, number] = transfer
        if kind == "load" and self._asks:
            self._reading[number] = wanted

    # What the explorer lets happen to transfers

    def find(self, kind: str, request_id: str) -> Transfer | None:
        """The oldest transfer of this kind for a request."""
        for (its_kind, _), transfer in self.transfers.items():
            if its_kind == kind and transfer.touch.request_id == request_id:
                return transfer
        return None

    def finish(self, transfer: Transfer, limit: int | None = None) -> int:
        """The copy ends; with `limit` it fails after so many good pages. Returns the number of good pages."""
        if transfer.touch.kind == "load":
            num_good = self._finish_load(transfer, limit)
            mark = Mark.LOADED
        else:
            if transfer.gathered is None:
                self.gather(transfer)
            num_good = self._finish_offload(transfer, limit)
            mark = Mark.OFFLOADED
        for page in transfer.pages:
            self.store.stop_touching(page, transfer.touch)
        del self.transfers[transfer.touch.kind, transfer.number]
        all_good = limit is None and num_good == len(transfer.pages)
        self._completions.append(Completion(mark, transfer.number, None if all_good else num_good))
        return num_good

    def gather(self, transfer: Transfer) -> None:
        """An offload has read its blocks."""
        transfer.gathered = [self.device.get(block) for block in transfer.blocks]
        for block, key, want in zip(transfer.blocks, transfer.gathered, transfer.wanted, strict=True):
            if key != want.key:
                raise Violation(
                    "no byte is served under a key it was not written for",
                    f"rank {self.number} stores block {block}, which holds {text_of(key)}, as {text_of(want.key)}",
                )
        self._release_blocks(transfer)
        self._completions.append(Completion(Mark.RELEASED, transfer.number))

    def _release_blocks(self, transfer: Transfer) -> None:
        for block in transfer.blocks:
            del self._block_touches[block]

    def _finish_load(self, transfer: Transfer, limit: int | None) -> int:
        num_good, stopped = 0, False
        for position, (page, want) in enumerate(zip(transfer.pages, transfer.wanted, strict=True)):
            content = self.store.contents[page][self.group_rank]
            if content != want and (page, self.group_rank) not in self.store.rotten:
                raise Violation(
                    "no byte is served under a key it was not written for",
                    f"rank {self.number} reads page {page} for {text_of(want.key)} and finds "
                    f"{describe_content(content)}",
                )
            good = content == want and (page, self.group_rank) not in self.store.rotten
            stopped = stopped or not good or position == limit
            num_good += not stopped
            self.device[transfer.blocks[position]] = None if stopped else want.key
        self._release_blocks(transfer)
        return num_good

    def _finish_offload(self, transfer: Transfer, limit: int | None) -> int:
        gathered = transfer.gathered or []
        num_good = len(transfer.pages) if limit is None else limit
        for position, (page, want) in enumerate(zip(transfer.pages, transfer.wanted, strict=True)):
            key = gathered[position]
            content = None if key is None or position >= num_good else Written(key, want.generation)
            self.store.write(page, self.group_rank, content)
        return num_good

    def drop_transfers(self) -> None:
        """The process is gone: its copies stop wherever they are."""
        for transfer in self.transfers.values():
            for page in transfer.pages:
                if transfer.touch.kind == "offload":
                    self.store.write(page, self.group_rank, None)
                self.store.stop_touching(page, transfer.touch)
        self.transfers.clear()

    # The step

    def poll(self) -> None:
        """Tell the member what finished here."""
        for done in self._completions:
            self.member.finish(done.mark, done.number, done.num_good)
        self._completions.clear()

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing in flight, as far as it knows itself."""
        return not self.lifecycle.pending and not self.transfers and not self._completions

    def skips_message(self, calls: Sequence[Call]) -> bool:
        """Whether it stays away from the exchange of a step. Never: that is the protocol."""
        return False

    def receive(self, message: bytes) -> StepResult:
        """Apply the message of a step as `Agreement` does."""
        if not message:
            return self.lifecycle.apply(NOTHING_AGREED)
        decision = msgspec.msgpack.decode(message, type=Decision)
        popped = self.member.apply(decision)
        failures = {(Mark(f.mark), f.number): f for f in decision.failures}
        result = self.lifecycle.apply(Agreed(popped, failures, decision.facts))
        for number in popped[Mark.LOADED] if self._asks else ():
            wanted = self._reading.pop(number)
            failure = failures.get((Mark.LOADED, number))
            if failure is not None:
                self.store.found_bad(self._group, wanted[failure.num_good])
        return result

    def check_device(self, expected: Sequence[tuple[str, int, bytes]]) -> None:
        """What a step calls loaded lies in the blocks of this rank: (request, block, key)."""
        for request_id, block, key in expected:
            if self.device.get(block) != key:
                raise Violation(
                    "what is loaded is on the device of every rank",
                    f"{request_id} counts as loaded, but block {block} of rank {self.number} holds "
                    f"{text_of(self.device.get(block))} instead of {text_of(key)}",
                )
