"""mlkv: a multi-level KV cache for LLM inference over many ranks.

This module is the public API. Everything that is not listed here is free to change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mlkv.version import __version__

if TYPE_CHECKING:
    from mlkv.cache import MultiLevelCache
    from mlkv.config import AgreeConfig, MetricsConfig, MLKVConfig, MoveConfig, StoreConfig
    from mlkv.dist import Place, Replica, init_process_group
    from mlkv.errors import (
        AgreementError,
        CacheUsageError,
        ConfigError,
        DeadlineExceeded,
        MasterFailed,
        MLKVError,
        RankLost,
        RanksDiverged,
        StoreError,
        StoreLost,
    )
    from mlkv.faults import FaultPlan
    from mlkv.keys import Namespace, page_keys
    from mlkv.layout import KVLayout, KVPool, Plane, RankSlice
    from mlkv.mover import Completion, Mover
    from mlkv.planner import Planner
    from mlkv.remote import RemoteMover, TransferOrder, TransferReport, TransferWorker
    from mlkv.tasks import NOTHING_TOLD, CacheStats, Failure, Hit, StepResult

_MODULE_OF = {
    "AgreeConfig": "mlkv.config",
    "AgreementError": "mlkv.errors",
    "CacheStats": "mlkv.tasks",
    "CacheUsageError": "mlkv.errors",
    "Completion": "mlkv.mover",
    "ConfigError": "mlkv.errors",
    "DeadlineExceeded": "mlkv.errors",
    "Failure": "mlkv.tasks",
    "FaultPlan": "mlkv.faults",
    "Hit": "mlkv.tasks",
    "KVLayout": "mlkv.layout",
    "KVPool": "mlkv.layout",
    "MLKVConfig": "mlkv.config",
    "MLKVError": "mlkv.errors",
    "MasterFailed": "mlkv.errors",
    "MetricsConfig": "mlkv.config",
    "MoveConfig": "mlkv.config",
    "Mover": "mlkv.mover",
    "MultiLevelCache": "mlkv.cache",
    "NOTHING_TOLD": "mlkv.tasks",
    "Namespace": "mlkv.keys",
    "Place": "mlkv.dist",
    "Plane": "mlkv.layout",
    "Planner": "mlkv.planner",
    "RankLost": "mlkv.errors",
    "RankSlice": "mlkv.layout",
    "RanksDiverged": "mlkv.errors",
    "RemoteMover": "mlkv.remote",
    "Replica": "mlkv.dist",
    "StepResult": "mlkv.tasks",
    "StoreConfig": "mlkv.config",
    "StoreError": "mlkv.errors",
    "StoreLost": "mlkv.errors",
    "TransferOrder": "mlkv.remote",
    "TransferReport": "mlkv.remote",
    "TransferWorker": "mlkv.remote",
    "init_process_group": "mlkv.dist",
    "page_keys": "mlkv.keys",
}


def __getattr__(name: str) -> object:
    # Names are imported when they are first used: the store's owner process lives in this package as well and
    # must not load torch.
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'mlkv' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


__all__ = [
    "NOTHING_TOLD",
    "AgreeConfig",
    "AgreementError",
    "CacheStats",
    "CacheUsageError",
    "Completion",
    "ConfigError",
    "DeadlineExceeded",
    "Failure",
    "FaultPlan",
    "Hit",
    "KVLayout",
    "KVPool",
    "MLKVConfig",
    "MLKVError",
    "MasterFailed",
    "MetricsConfig",
    "MoveConfig",
    "Mover",
    "MultiLevelCache",
    "Namespace",
    "Place",
    "Plane",
    "Planner",
    "RankLost",
    "RankSlice",
    "RanksDiverged",
    "RemoteMover",
    "Replica",
    "StepResult",
    "StoreConfig",
    "StoreError",
    "StoreLost",
    "TransferOrder",
    "TransferReport",
    "TransferWorker",
    "__version__",
    "init_process_group",
    "page_keys",
]
