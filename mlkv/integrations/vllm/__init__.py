"""mlkv in vLLM, turned on by one argument::

    --kv-transfer-config '{"kv_connector": "MLKVConnector", "kv_connector_module_path": "mlkv.integrations.vllm",
                           "kv_role": "kv_both", "kv_connector_extra_config": {"store": {"host_bytes": "8GiB"}}}'

`kv_connector_extra_config` takes the settings of `mlkv.MLKVConfig`, and `on_load_failure`; see docs/vllm.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlkv.integrations.vllm.connector import MLKVConnector


def __getattr__(name: str) -> object:
    # vLLM is imported when it asks for its connector, so that parts of this package can be used without it.
    if name != "MLKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mlkv.integrations.vllm.connector import MLKVConnector

    return MLKVConnector


__all__ = ["MLKVConnector"]
