"""The engine of a replica: what its requests want between two steps, and whether a step's result makes sense.

All ranks of a replica run the same engine on the same results, so there is one here for all of them: the first
rank that has a result feeds it in, and every rank makes the calls that follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from mlkv.dist.explore import Violation
from mlkv.explore.rank import Call
from mlkv.explore.words import PAGE_TOKENS, keys_of, split
from mlkv.tasks import Failure, Hit, StepResult

WISHES = ("nolookup", "decline", "hurry", "nooffload", "again")
"""What a request may want other than looking up, loading, computing, storing: no lookup at all; decline the hit;
decline before the answer; store nothing; a second turn that continues the first while that is being stored."""

SECOND_TURN = " and then it said"


class Want(Enum):
    LOOKUP = auto()
    HURRY = auto()  # declines before the answer
    ANSWER = auto()
    USE = auto()  # has a hit, decides what to do with it
    LOADED = auto()
    COMPUTE = auto()
    STORE = auto()
    LEAVE = auto()


@dataclass
class VirtualRequest:
    """A request in its current life.

    Attributes:
        blocks: device blocks, one for each page of the prompt, also for a page in part.
        num_valid: pages from the front that hold their KV.
        unreleased, unstored: its offload still reads the blocks; is not settled yet.
    """

    request_id: str
    text: str
    wishes: frozenset[str]
    wants: Want = Want.LOOKUP
    blocks: list[int] = field(default_factory=list)
    num_valid: int = 0
    device_tokens: int = 0
    hit: Hit = field(default_factory=lambda: Hit(0))
    unreleased: bool = False
    unstored: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.text.split())

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // PAGE_TOKENS)


class VirtualEngine:
    """Attributes:
    requests: those that are not finished, by id.
    draining: blocks of aborted lives, until their `released` comes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.requests: dict[str, VirtualRequest] = {}
        self.draining: dict[str, list[int]] = {}
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._orders: list[Call] = []  # what came from outside since the last step

    @property
    def is_idle(self) -> bool:
        return not (self.requests or self.draining or self._orders)

    # From outside

    def order_request(self, request_id: str, text: str, wishes: frozenset[str]) -> bool:
        """A request arrives. It has to fit, with its second turn."""
        fits = -(-len((text + SECOND_TURN).split()) // PAGE_TOKENS) <= self._num_blocks
        if self._knows(request_id) or request_id in self.draining or not text.split() or not fits:
            return False
        self._orders.append(("request", request_id, text, wishes))
        return True

    def order_abort(self, request_id: str, *, lives_on: bool) -> bool:
        """Abort a request; with `lives_on` it was preempted and starts anew at once, under the same id."""
        ordered = any(order[1] == request_id for order in self._orders if order[0] != "clear")
        if request_id not in self.requests or request_id in self.draining or ordered:
            return False
        self._orders.append(("preempt" if lives_on else "abort", request_id))
        return True

    def order_clear(self) -> bool:
        if ("clear",) in self._orders:
            return False
        self._orders.append(("clear",))
        return True

    @property
    def num_requests(self) -> int:
        return len(self.requests) + len(self._orders)

    def _knows(self, request_id: str) -> bool:
        return request_id in self.requests or any(request_id in order[1:2] for order in self._orders)

    # A step

    def plan(self) -> list[Call]:
        """The calls of all ranks before their next step."""
        calls: list[Call] = []
        orders, self._orders = self._orders, []
        for order in orders:
            self._obey(order, calls)
        for request in list(self.requests.values()):
            self._advance(request, calls)
        return calls

    def _obey(self, order: Call, calls: list[Call]) -> None:
        match order:
            case ("request", str(name), str(text), frozenset() as wishes):
                self._start(name, text, wishes)
            case ("abort" | "preempt" as verb, str(name)) if name in self.requests:
                request = self.requests.pop(name)
                self.draining[name] = request.blocks
                calls.append(("abort", name))
                if verb == "preempt":
                    done = {"again"} if request.device_tokens else set()
                    self._start(name, request.text, request.wishes - done)
            case ("clear",):
                calls.append(order)

    def _start(self, request_id: str, text: str, wishes: frozenset[str]) -> None:
        want = Want.COMPUTE if "nolookup" in wishes else Want.LOOKUP
        self.requests[request_id] = VirtualRequest(request_id, text, wishes, want)

    def _advance(self, request: VirtualRequest, calls: list[Call]) -> None:
        name = request.request_id
        if request.wants is Want.LOOKUP:
            calls.append(("lookup", name, request.text, request.device_tokens))
            request.wants = Want.HURRY if "hurry" in request.wishes else Want.ANSWER
        elif request.wants is Want.HURRY:
            calls.append(("decline", name))
            request.wants = Want.COMPUTE
        elif request.wants is Want.USE:
            self._use(request, calls)
        elif request.wants is Want.COMPUTE:
            self._compute(request, calls)
        if request.wants is Want.STORE and not (request.unreleased or request.unstored):
            if "nooffload" not in request.wishes:
                calls.append(("offload", name, request.text, self._slots(request)))
                request.unreleased = request.unstored = True
            request.wants = Want.LEAVE
            if "again" in request.wishes and not request.device_tokens:
                self._continue(request)
        if request.wants is Want.LEAVE and not (request.unreleased or request.unstored):
            self._free += request.blocks
            del self.requests[name]

    def _continue(self, request: VirtualRequest) -> None:
        """A second turn: longer, and the device has all of the first."""
        request.device_tokens = request.num_tokens
        request.num_valid = request.num_tokens // PAGE_TOKENS
        request.text += SECOND_TURN
        request.wants = Want.LOOKUP

    def _compute(self, request: VirtualRequest, calls: list[Call]) -> None:
        if self._allocate(request):
            keys: list[bytes | None] = list(split(keys_of(request.text)))
            keys += [None] * (request.num_pages - len(keys))
            todo = list(zip(request.blocks, keys, strict=True))[request.num_valid :]
            calls.append(("compute", request.request_id, todo))
            request.wants = Want.STORE
        elif request.device_tokens:
            # Two second turns that wait for each other's blocks would wait for ever.
            request.wants = Want.LEAVE

    def _use(self, request: VirtualRequest, calls: list[Call]) -> None:
        first, end = request.hit.start // PAGE_TOKENS, request.hit.num_tokens // PAGE_TOKENS
        if request.wishes & {"decline", "hurry"} or not self._allocate(request):
            calls.append(("decline", request.request_id))
            request.wants = Want.COMPUTE
            return
        slots = self._slots(request)[first * PAGE_TOKENS : end * PAGE_TOKENS]
        for at in range(request.device_tokens - request.hit.start):
            slots[at] = -1
        calls.append(("load", request.request_id, slots))
        request.wants = Want.LOADED

    def _slots(self, request: VirtualRequest) -> list[int]:
        slots = [block * PAGE_TOKENS + token for block in request.blocks for token in range(PAGE_TOKENS)]
        return slots[: request.num_tokens]

    def _allocate(self, request: VirtualRequest) -> bool:
        missing = request.num_pages - len(request.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            request.blocks.append(self._free.pop())
        return True

    # Its result

    def take(self, result: StepResult) -> list[tuple[str, int, bytes]]:
        """Learn what a step agreed. Returns what must now lie on the device: (request, block, key)."""
        loaded: list[tuple[str, int, bytes]] = []
        for name, hit in result.hits.items():
            self._take_hit(name, hit)
        for name, num_tokens in result.loaded.items():
            loaded += self._take_loaded(name, num_tokens, complete=True)
        for name, failure in result.failed.items():
            loaded += self._take_loaded(name, failure.num_tokens, complete=False)
        for name in result.released:
            self._take_released(name)
        for name in (*result.offloaded, *result.unstored):
            self._take_stored(name, result.unstored.get(name))
        return loaded

    def _take_hit(self, name: str, hit: Hit) -> None:
        request = self.requests.get(name)
        if request is None or request.wants not in (Want.ANSWER, Want.HURRY):
            raise _nonsense(f"a hit for {name}, which waits for none")
        if hit.num_tokens >= request.num_tokens:
            raise Violation(
                "at least one token is computed",
                f"{name} has {request.num_tokens} tokens and a hit of {hit.num_tokens}",
            )
        if hit.num_tokens % PAGE_TOKENS or hit.start % PAGE_TOKENS:
            raise _nonsense(f"{hit} for {name} is no whole number of pages")
        if hit.num_tokens and not hit.start <= request.device_tokens < hit.num_tokens:
            raise _nonsense(f"{hit} for {name}, which has {request.device_tokens} tokens on the device already")
        request.hit = hit
        request.wants = Want.USE if hit.num_tokens else Want.COMPUTE

    def _take_loaded(self, name: str, num_tokens: int, *, complete: bool) -> list[tuple[str, int, bytes]]:
        request = self.requests.get(name)
        if request is None or request.wants is not Want.LOADED:
            raise _nonsense(f"the end of a load of {name}, which loads nothing")
        if complete != (num_tokens == request.hit.num_tokens) or num_tokens < request.device_tokens:
            raise _nonsense(f"a load of {name} with {request.hit} ended with {num_tokens} tokens")
        request.num_valid = num_tokens // PAGE_TOKENS
        request.wants = Want.COMPUTE
        keys = split(keys_of(request.text))[: request.num_valid]
        # Pages that were on the device before the load are the engine's own.
        first = request.hit.start // PAGE_TOKENS
        return [
            (name, block, key)
            for block, key in list(zip(request.blocks, keys, strict=False))[first : request.num_valid]
        ]

    def _take_released(self, name: str) -> None:
        if name in self.draining:
            self._free += self.draining.pop(name)
            return
        request = self.requests.get(name)
        if request is None or not request.unreleased:
            raise _nonsense(f"{name} was released, but nothing of it was in flight")
        request.unreleased = False

    def _take_stored(self, name: str, failure: Failure | None) -> None:
        request = self.requests.get(name)
        if request is None or not request.unstored:
            raise _nonsense(f"the end of an offload of {name}, which stores nothing")
        if request.unreleased:
            raise _nonsense(f"the offload of {name} ended before its slots were released")
        request.unstored = False


def _nonsense(what: str) -> Violation:
    return Violation("a step tells only what was asked for", what)
