"""Text to tokens and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer

from mlkv.errors import ConfigError


class Tokenizer(Protocol):
    """What the deployment needs of a tokenizer. `stop_ids` end a generation."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...
    def encode(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation of {"role", "content"} up to where the assistant is to speak."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """A token for each byte of UTF-8: for models with random weights, which never stop by themselves."""

    stop_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        turns = [f"<{m['role']}>\n{m['content']}\n" for m in messages]
        return self.encode("".join(turns) + "<assistant>\n")

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")


class FolderTokenizer:
    """The tokenizer that lies in a model's folder."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # the kind of error depends on which of its files is missing or torn
            raise ConfigError(f"model: {folder} has no tokenizer that transformers can load: {error}") from None
        eos = self._tokenizer.eos_token_id
        self.stop_ids = () if eos is None else (int(eos),)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not self._tokenizer.chat_template:
            return self.encode("\n\n".join(m["content"] for m in messages) + "\n\n")
        turns = [dict(m) for m in messages]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
