"""vLLM's interface on one side, the scheduler's and the worker's halves on the other. No decisions here."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import vllm.envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from mlkv import ConfigError, MultiLevelCache
from mlkv.integrations.vllm.metrics import MLKVPromMetrics, MLKVStats
from mlkv.integrations.vllm.ranks import (
    NO_ORDERS,
    CentralScheduler,
    LocalRank,
    RemoteRank,
    StepOrders,
    make_worker_half,
)
from mlkv.integrations.vllm.scheduler import NO_OUTCOME, SchedulerSide
from mlkv.integrations.vllm.settings import Settings, read_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_NO_BLOCKS: frozenset[int] = frozenset()
_NOTHING_OVER = KVConnectorTransferResults(*[frozenset()] * 3)
"""Of idle steps. Frozen, so that nobody can leave something in what all of them share."""


def _start_no_load(_: object, **kwargs: object) -> None:
    """In place of `start_load_kv`: see `LocalRank.step`."""


_NOTHING_TRAVELS = {
    "bind_connector_metadata": bool,
    "build_connector_worker_meta": type(None),
    "clear_connector_metadata": type(None),
    "start_load_kv": _start_no_load,
    "update_connector_output": bool,
}
"""Where scheduler and worker share a process: in place of the hooks that carry something between them."""

_SCHEDULER_COUNTS = {"get_kv_connector_stats": type(None)}
"""In place of the hook of workers' connectors: vLLM asks the scheduler's as well, which knows all there is."""


class MLKVConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One of these in vLLM's scheduler, one in each worker.

    vLLM calls some twenty of its methods in every step, most of them right after the model, when each call of
    Python code costs one or two microseconds. Those that mostly have nothing to do find that out with as few
    further calls as they can; those that never have are types, which are called without running Python code.

    Raises:
        ConfigError: for settings that are wrong, or a deployment that mlkv does not serve.
    """

    _local: ClassVar[dict[str, LocalRank]] = {}
    """Engines of this process whose worker is here: the scheduler's half finds it by the engine's name."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(vllm_config, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._central: CentralScheduler | None = None
        self._rank: LocalRank | None = None  # this engine's worker, where it is in the process of its scheduler
        self._remote: RemoteRank | None = None
        self._bad_blocks: Set[int] = _NO_BLOCKS
        # Where the caller of the engine drives its steps, none comes after the last request has ended.
        self._drains = self._settings.one_process and not vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(self._settings)
            if self._settings.one_process:
                self._rank = self._find_rank()
                self._rank.serve(self._scheduler)
            else:
                self._central = CentralScheduler(self._settings, self._scheduler)
        else:
            self.__dict__.update(_SCHEDULER_COUNTS)
        if self._settings.one_process:
            self.__dict__.update(_NOTHING_TRAVELS)

    @classmethod
    def local_caches(cls) -> list[MultiLevelCache]:
        """The caches of the engines whose scheduler and worker live in this process."""
        return [rank.cache for rank in cls._local.values()]

    def _find_rank(self) -> LocalRank:
        rank = self._local.get(self._settings.engine)
        if rank is None:
            raise ConfigError("the worker of this engine is not in the process of its scheduler")
        return rank

    @staticmethod
    def make_worker_half(settings: Settings, kv_caches: dict[str, torch.Tensor]) -> LocalRank | RemoteRank:
        return make_worker_half(settings, kv_caches)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what is not stored is computed again

    def shutdown(self) -> None:
        if self._central is not None:
            self._central.close()
            self._central = None
        if self.role is KVConnectorRole.WORKER:
            self._local.pop(self._settings.engine, None)
            for half in (self._rank, self._remote):
                if half is not None:
                    half.close()
            self._rank = self._remote = None

    # -- worker --------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        half = self.make_worker_half(self._settings, kv_caches)
        if isinstance(half, LocalRank):
            self._rank = self._local[self._settings.engine] = half
        else:
            self._remote = half

    # Every layer asks, for the sake of `wait_for_layer_load` and `save_kv_layer`, which need not be called.
    has_connector_metadata = staticmethod(bool)  # without an argument: False
    handle_preemptions = staticmethod(bool)  # what is stored keeps its blocks; the value is not looked at
    get_kv_connector_kv_cache_events: Any = staticmethod(type(None))  # None

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._remote is not None:
            self._remote.before_model(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are complete before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole pages are stored after the model, not layers during it."""

    def wait_for_save(self) -> None:
        if self._rank is not None:
            if self._rank.scheduler.stores:
                self._rank.scheduler.start_stores()
        elif self._remote is not None:
            self._remote.after_model(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Called once in every step of the engine, on every rank."""
        half = self._remote if self._rank is None else self._rank
        outcome = NO_OUTCOME if half is None else half.step()
        if outcome is NO_OUTCOME:
            return _NOTHING_OVER
        self._bad_blocks = outcome.bad_blocks
        return KVConnectorTransferResults(finished_recving=outcome.received)

    def get_block_ids_with_load_errors(self) -> Set[int]:
        """Of the loads that the last `get_transfer_results` has reported as over."""
        bad, self._bad_blocks = self._bad_blocks, _NO_BLOCKS
        return bad

    def build_connector_worker_meta(self) -> Any:
        return None if self._remote is None else self._remote.take_report()

    def get_kv_connector_stats(self) -> MLKVStats | None:
        if self._rank is not None:
            return self._rank.take_stats() if self._rank.has_counted else None
        return None if self._central is None else self._central.take_stats()

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepOrders)
        return metadata

    # -- scheduler -----------------------------------------------------------------------------------------

    @property
    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "called on a worker's connector"
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._side.bind(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self._side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        matched = self._side.matched_tokens(request, num_computed_tokens)
        return matched, bool(matched)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._side.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        assert self._scheduler is not None
        self._scheduler.scheduled(scheduler_output)
        return NO_ORDERS if self._central is None else self._central.plan()

    take_events = staticmethod(tuple)  # ()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._central is not None:
            self._central.hear(connector_output.kv_connector_worker_meta)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        loaded_tokens = self._side.finished(request, block_ids[0])
        if self._drains and self._rank is not None and not self._side.num_live:
            self._rank.drain()
        # Told with the answer; blocks that are still being read have references of their own.
        return False, {"mlkv_loaded_tokens": loaded_tokens} if loaded_tokens else None

    def has_pending_block_frees(self) -> bool:
        return self._side.holds_blocks

    def has_pending_push_work(self) -> bool:
        return self._side.busy

    def reset_cache(self) -> bool:
        self._side.clear()
        return True

    # -- metrics -------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MLKVStats:
        return MLKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MLKVPromMetrics:
        return MLKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
