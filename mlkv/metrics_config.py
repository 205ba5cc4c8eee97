"""Settings of metrics."""

from __future__ import annotations

from pydantic import Field

from mlkv.section import Section


class MetricsConfig(Section):
    """Counters for Prometheus, from the owner of a store and from ranks. Needs the extra `metrics`."""

    port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="of the owner; rank r (counted over all replicas) has port + 1 + r. 0: no metrics",
    )
    address: str = Field(default="127.0.0.1", description="to listen at; default: only from this host")
