"""What is asked, in which order, and when: documents with several questions, conversations that interleave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from mlkv.engine.tokenizer import Tokenizer
from mlkv.errors import ConfigError

DOCUMENTS_PER_REPLICA = 3
"""At least: between two questions about a document come all other documents, which together do not fit beside it."""

MIN_DOCUMENTS = 6

DOCUMENT_TOKENS = {"cpu": 640, "cuda": 6144}
"""Length of a document. On a CPU for a run of a minute or two, on a GPU for prompts that take it some time."""

_ANSWER_SLACK_TOKENS = 16
"""An answer that returns in the next turn's prompt may be cut into other tokens, and has a template around it."""

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
    lines, left = [], num_tokens
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


def prompt_bounds(asks: Sequence[Ask], tokenizer: Tokenizer, max_new_tokens: int) -> dict[str, int]:
    """For each request the most tokens its prompt can have, when the answers in it are not known yet."""
    conversations: dict[str, list[Message]] = {}
    turns: dict[str, int] = {}
    bounds = {}
    for ask in asks:
        before: list[Message] = []
        turns[ask.request_id] = 0
        if ask.after is not None:
            before = [*conversations[ask.after], {"role": "assistant", "content": ""}]
            turns[ask.request_id] = turns[ask.after] + 1
        conversations[ask.request_id] = [*before, *ask.messages]
        answers = turns[ask.request_id] * (max_new_tokens + _ANSWER_SLACK_TOKENS)
        bounds[ask.request_id] = len(tokenizer.encode_chat(conversations[ask.request_id])) + answers
    return bounds


def pool_tokens(bounds: Mapping[str, int], max_new_tokens: int, asks: Sequence[Ask], concurrency: int) -> int:
    """Room for the running requests, and for about a third of all that a replica is asked.

    Turns of one conversation are counted once: they hold the same tokens.
    """
    longest = max(bounds.values()) + max_new_tokens
    continued = {ask.after for ask in asks}
    whole = sum(bounds[ask.request_id] + max_new_tokens for ask in asks if ask.request_id not in continued)
    return max(min(concurrency, len(asks)) * longest, whole // 3)
