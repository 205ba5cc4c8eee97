"""What is asked, in which order, and when: documents with several questions, conversations that interleave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from mlkv import page_keys
from mlkv.engine.tokenizer import Tokenizer
from mlkv.errors import ConfigError

DOCUMENTS_PER_REPLICA = 3
"""At least: between two rounds of questions about a document come all others, which do not fit beside it."""

MIN_DOCUMENTS = 6

DOCUMENT_TOKENS = {"cpu": 512, "cuda": 6144}
"""Length of a document. On a CPU for a run of a minute or two, on a GPU for prompts that take it some time."""

_ANSWER_SLACK_TOKENS = 16
"""An answer that returns in the next turn's prompt may be cut into other tokens, and has a template around it."""

_KEY_BYTES = 16
"""Of `page_keys`."""

FIRST = "Summarise this text in one sentence."
FOLLOW_UP = "Now name one thing in the text that this summary leaves out."
OTHERS = (
    "Which rule in this text is the most important one for a beginner, and why?",
    "Quote one short example from this text and explain it.",
)

Message = dict[str, str]


class Ask(msgspec.Struct, frozen=True):
    """One request of a workload.

    Attributes:
        messages: what it adds to its conversation; for the first turn the conversation.
        after: the request whose answer comes before these messages; it must be answered first.
        place: where it is from, for error messages.
    """

    request_id: str
    messages: list[Message]
    after: str | None = None
    place: str = ""


def default_workload(tokenizer: Tokenizer, dp: int, context_tokens: int, device: str) -> list[list[Ask]]:
    """For each replica its requests about its own documents.

    Three rounds over the documents: a first question each; two other questions, one right after the other; a
    second turn of the first conversation. So every document is asked for again after all others, when a pool
    that holds a third of them has lost it, and once again at once, when it is still there.

    Raises ConfigError when the context is too short for a document.
    """
    count = max(MIN_DOCUMENTS, DOCUMENTS_PER_REPLICA * dp)
    length = min(DOCUMENT_TOKENS[device], context_tokens // 2)
    if length < 128:
        raise ConfigError(f"model: its context of {context_tokens} tokens is too short for the default documents")
    documents = _documents(tokenizer, count, length)
    return [_rounds(dict(list(documents.items())[replica::dp])) for replica in range(dp)]


def _rounds(documents: Mapping[str, str]) -> list[Ask]:
    asks = []
    for name, text in documents.items():
        asks.append(Ask(f"{name}/1", [_user(f"{text}\n\n{FIRST}")]))
    for name, text in documents.items():
        for number, question in enumerate(OTHERS, start=2):
            asks.append(Ask(f"{name}/{number}", [_user(f"{text}\n\n{question}")]))
    for name in documents:
        asks.append(Ask(f"{name}/1+", [_user(FOLLOW_UP)], after=f"{name}/1"))
    return asks


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _documents(tokenizer: Tokenizer, count: int, num_tokens: int) -> dict[str, str]:
    """The longest help texts of this Python's standard library, each cut to about `num_tokens` tokens."""
    from pydoc_data.topics import topics

    names = sorted(topics, key=lambda name: (-len(topics[name]), name))
    if count > len(names):
        raise ConfigError(f"dp: there are documents for {len(names) // DOCUMENTS_PER_REPLICA} replicas at most")
    return {name: _cut(tokenizer, topics[name].strip(), num_tokens) for name in names[:count]}


def _cut(tokenizer: Tokenizer, text: str, num_tokens: int) -> str:
    """Whole lines from the front, at least one, of about that many tokens."""
    lines: list[str] = []
    left = num_tokens
    # A token is rarely longer than 16 characters; what lies beyond need not be looked at.
    for line in text[: num_tokens * 16].splitlines():
        left -= len(tokenizer.encode(line + "\n"))
        if left < 0 and lines:
            break
        lines.append(line)
    return "\n".join(lines)


class Feed:
    """Hands out the requests of one replica in their order, whatever happens in between.

    A request is due when all before it have been handed out, fewer than `concurrency` are unanswered, and the one
    it continues is answered. So which is next never depends on how fast another one was.
    """

    def __init__(self, asks: Sequence[Ask], tokenizer: Tokenizer, concurrency: int) -> None:
        self._asks, self._tokenizer, self._concurrency = list(asks), tokenizer, concurrency
        self._next = 0
        self._open: set[str] = set()
        self._conversations: dict[str, list[Message]] = {}
        self._answers: dict[str, str] = {}

    @property
    def done(self) -> bool:
        return self._next == len(self._asks) and not self._open

    def due(self) -> list[tuple[Ask, list[int]]]:
        """Requests to submit now, with their prompts."""
        found = []
        while self._next < len(self._asks) and len(self._open) < self._concurrency:
            ask = self._asks[self._next]
            if ask.after is not None and ask.after not in self._answers:
                break
            self._next += 1
            self._open.add(ask.request_id)
            conversation = list(ask.messages)
            if ask.after is not None:
                answer = {"role": "assistant", "content": self._answers[ask.after]}
                conversation = [*self._conversations[ask.after], answer, *ask.messages]
            self._conversations[ask.request_id] = conversation
            found.append((ask, self._tokenizer.encode_chat(conversation)))
        return found

    def answered(self, request_id: str, tokens: Sequence[int]) -> str:
        """Take in an answer; its text."""
        self._open.remove(request_id)
        self._answers[request_id] = self._tokenizer.decode(tokens)
        return self._answers[request_id]


@dataclass(frozen=True)
class Demand:
    """How much KV the requests of one replica have.

    Attributes:
        longest_tokens: for each request the most tokens that its prompt can have: the answers of earlier turns
            in it are not known yet.
        num_pages: different whole pages of all prompts together.
    """

    longest_tokens: dict[str, int]
    num_pages: int

    @property
    def median_tokens(self) -> int:
        return int(median(self.longest_tokens.values()))

    def host_pages(self, max_new_tokens: int, page_tokens: int) -> int:
        """Pages of all prompts and answers together, and a quarter more, so that nothing is evicted."""
        answer = -(-(max_new_tokens + _ANSWER_SLACK_TOKENS) // page_tokens) + 1
        return (self.num_pages + answer * len(self.longest_tokens)) * 5 // 4

    @classmethod
    def of(cls, asks: Sequence[Ask], tokenizer: Tokenizer, max_new_tokens: int, page_tokens: int) -> Demand:
        conversations: dict[str, list[Message]] = {}
        turns: dict[str, int] = {}
        longest = {}
        pages: set[bytes] = set()
        for ask in asks:
            before: list[Message] = []
            turns[ask.request_id] = 0
            if ask.after is not None:
                before = [*conversations[ask.after], {"role": "assistant", "content": ""}]
                turns[ask.request_id] = turns[ask.after] + 1
            conversations[ask.request_id] = [*before, *ask.messages]
            tokens = tokenizer.encode_chat(conversations[ask.request_id])
            answers = turns[ask.request_id] * (max_new_tokens + _ANSWER_SLACK_TOKENS)
            longest[ask.request_id] = len(tokens) + answers
            keys = page_keys(tokens, page_tokens, bytes(_KEY_BYTES))
            pages.update(keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES))
        return cls(longest, len(pages))

    def pool_pages(self, max_new_tokens: int, page_tokens: int, concurrency: int, context_tokens: int) -> int:
        """Pages of a pool that serves the requests and holds about a third of their KV.

        It has room for `concurrency` of the longest requests, so that those need not wait for each other.
        """
        tokens = min(max(self.longest_tokens.values()) + max_new_tokens, context_tokens)
        running = min(concurrency, len(self.longest_tokens))
        return max(running * -(-tokens // page_tokens), self.num_pages // 3)
