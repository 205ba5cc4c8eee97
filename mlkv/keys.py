"""Page keys: 128 bits that name a prefix of tokens under everything that its KV depends on.

The key of a page is a cryptographic hash over its parent's key and its own tokens; the parent of the first page
is the root, a hash of the namespace. Equal in every process and on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mlkv.errors import ConfigError

if TYPE_CHECKING:  # the store's owner handles keys, and has no use for torch
    from mlkv.layout import KVLayout

KEY_BYTES = 16
_KEY_SCHEME = "mlkv-key-1-blake2b-128"

TokenArray = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Namespace:
    """What KV depends on besides the tokens. Two namespaces that differ in anything share no page.

    Attributes:
        model: identity of the weights: a digest, or a name with its revision.
        layout: geometry, dtype and page size (the TP size is not part of it: pages are TP-agnostic).
        version: counts updates of the weights; raised when the old KV must no longer be used.
        epoch: counts invalidations of the namespace while its settings stay the same. It changes the keys of all
            pages but not the fingerprint, by which stores know the namespace.
    """

    model: str
    layout: KVLayout
    version: int = 0
    epoch: int = 0
    fingerprint: bytes = field(init=False)

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model: the namespace needs the model's identity (digest, or name@revision)")
        text = json.dumps([_KEY_SCHEME, self.model, self.version, self.layout.fingerprint.hex()])
        object.__setattr__(self, "fingerprint", hashlib.blake2b(text.encode(), digest_size=16).digest())

    def root(self, *, adapter: str = "", media: Sequence[str] = (), salt: str = "") -> bytes:
        """The parent of a first page: the namespace and what is the request's own.

        Args:
            adapter: LoRA (or other adapter) identity.
            media: hashes of the multimodal items of the prompt, in their order.
            salt: secret of a tenant whose prefixes nobody else may share or probe.
        """
        return root_key(self.fingerprint, self.epoch, adapter=adapter, media=media, salt=salt)


def root_key(
    fingerprint: bytes, epoch: int, *, adapter: str = "", media: Sequence[str] = (), salt: str = ""
) -> bytes:
    """`Namespace.root` of the namespace with this fingerprint in this epoch: 16 bytes."""
    if not (adapter or media or salt or epoch):
        return fingerprint
    parts = [adapter, list(media), salt, epoch] if epoch else [adapter, list(media), salt]
    return hashlib.blake2b(fingerprint + json.dumps(parts).encode(), digest_size=KEY_BYTES).digest()


def as_tokens(tokens: Sequence[int] | npt.NDArray[np.integer]) -> TokenArray:
    """Token ids as uint32 `[n]`. Lists, tuples and any integer array give equal results.

    Raises ConfigError for ids that are not integers in [0, 2**32).
    """
    array = np.asarray(tokens)
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"tokens must be a flat sequence of integers, got {array.dtype} of {array.shape}")
    if int(array.min()) < 0 or int(array.max()) >= 1 << 32:
        raise ConfigError(f"token ids must lie in [0, 2**32), got {int(array.min())}..{int(array.max())}")
    return array.astype(np.uint32)


def page_keys(tokens: Sequence[int] | npt.NDArray[np.integer], page_tokens: int, root: bytes) -> bytes:
    """Chained keys of all whole pages of `tokens`: one blob of 16 bytes a page. A partial tail has no key."""
    array = as_tokens(tokens)
    data = memoryview(array.astype("<u4", copy=False).tobytes())
    step = 4 * page_tokens
    key = root
    keys = bytearray()
    for at in range(0, len(array) // page_tokens * step, step):
        digest = blake2b(key, digest_size=KEY_BYTES)
        digest.update(data[at : at + step])
        key = digest.digest()
        keys += key
    return bytes(keys)
