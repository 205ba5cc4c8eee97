"""What an object holds on to, without knowing what it is: its size in values, and its state as one value."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from enum import Enum
from typing import Any, cast

import numpy as np
import torch

from mlkv.histogram import Histogram

_PLAIN = frozenset((int, float, str, bytes, bool, type(None)))


def footprint(root: object) -> int:
    """Number of values reachable inside containers from `root`, through objects of this library."""
    seen: set[int] = set()
    todo: list[object] = [root]
    held = 0
    while todo:
        value = todo.pop()
        if type(value) in _PLAIN:
            held += 1
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            todo += value
        elif type(value).__module__.startswith("mlkv") and not isinstance(value, (type, Enum)):
            todo += _attributes(value).values()
    return held


def freeze(value: object, left_out: frozenset[str], seen: dict[int, int] | None = None) -> Hashable:
    """The state of a whole web of objects as one hashable value: equal states give equal values.

    Args:
        left_out: names of attributes that do not matter for what can follow.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if seen is None:
        seen = {}
    if kind in (tuple, list, deque):
        return tuple([freeze(part, left_out, seen) for part in cast("Sequence[object]", value)])
    if kind is dict:
        # In their order: what is done first may depend on it.
        items = cast("dict[object, object]", value).items()
        return tuple([(freeze(k, left_out, seen), freeze(v, left_out, seen)) for k, v in items])
    if isinstance(value, (int, str, Enum)):
        return value
    if isinstance(value, (np.ndarray, array)):
        return value.tobytes()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if kind is Histogram:
        return None  # how long things took; nothing is ever decided from it
    if isinstance(value, tuple):
        return tuple([freeze(part, left_out, seen) for part in value])
    if isinstance(value, (set, frozenset)):
        return frozenset([freeze(part, left_out, seen) for part in value])
    if isinstance(value, (torch.Tensor, range)):
        return tuple(value.tolist() if isinstance(value, torch.Tensor) else value)
    number = seen.get(id(value))
    if number is not None:
        return ("again", number)  # objects point at each other
    seen[id(value)] = len(seen)
    frozen = getattr(value, "frozen", None)
    if frozen is not None and not isinstance(value, type):
        return freeze(frozen(), left_out, seen)  # it knows better what of it matters
    if isinstance(value, type) or callable(value):
        return cast(str, getattr(value, "__qualname__", kind.__name__))
    attributes = _attributes(value)
    return tuple([freeze(part, left_out, seen) for name, part in attributes.items() if name not in left_out])


def _attributes(value: object) -> dict[str, Any]:
    own = getattr(value, "__dict__", None)
    if own is not None:
        return own  # type: ignore[no-any-return]
    return {name: getattr(value, name, None) for name in getattr(type(value), "__struct_fields__", ())}
