"""Prompts from a file: one a line, as JSON or as plain text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlkv.engine.workload import Ask, Message
from mlkv.errors import ConfigError

_ROLES = ("system", "user", "assistant")


def read_prompts(path: Path) -> list[Ask]:
    """The requests of a prompts file, in the order of its lines. Blank lines are skipped.

    A line that begins with "{" is a JSON object with "prompt" (text) or "messages" (a list of objects with
    "role" and "content", the last of them not the assistant's); any other line is plain text. Text is taken as
    what the user says, so a model with a chat template sees it within that.

    Raises ConfigError that names the file, and the line where one is wrong.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"prompts: cannot read {path}: {error.strerror}") from None
    asks = []
    for number, line in enumerate(data.splitlines(), start=1):
        place = f"{path} line {number}"
        try:
            text = line.decode().strip()
        except UnicodeDecodeError:
            raise ConfigError(f"prompts: {place}: not valid UTF-8") from None
        if text:
            asks.append(Ask(f"line{number}", _messages(text, place), place=place))
    if not asks:
        raise ConfigError(f"prompts: {path} is empty")
    return asks


def _messages(text: str, place: str) -> list[Message]:
    if not text.startswith("{"):
        return [{"role": "user", "content": text}]
    try:
        entry: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"prompts: {place}: malformed JSON: {error.msg} at column {error.colno}") from None
    if set(entry) == {"prompt"}:
        prompt = entry["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f'prompts: {place}: "prompt" must be text that is not empty')
        return [{"role": "user", "content": prompt}]
    if set(entry) == {"messages"}:
        return _conversation(entry["messages"], place)
    raise ConfigError(f'prompts: {place}: expected one key, "prompt" or "messages"; found {sorted(entry)}')


def _conversation(messages: Any, place: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f'prompts: {place}: "messages" must be a list that is not empty')
    for index, message in enumerate(messages):
        right = isinstance(message, dict) and set(message) == {"role", "content"}
        if not right or message["role"] not in _ROLES or not isinstance(message["content"], str):
            raise ConfigError(
                f"prompts: {place}: message {index + 1} must be an object with role ({', '.join(_ROLES)}) and "
                "content (text)"
            )
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"prompts: {place}: the last message is the assistant's, there is nothing to answer")
    return messages
