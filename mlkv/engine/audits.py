"""What must hold at the end of the main job, checked by the launcher on what ranks have written."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from mlkv.engine.model import DTYPES
from mlkv.engine.plan import JobPlan, LogitNoise, RankResult, ReplicaResult

NOISE_FACTOR = 2.0
"""Logits with the cache on may differ from those with it off by this times what another chunking alone changes.
Both are maxima over samples of the same noise, which lie well within a factor of two; KV of other tokens is off
by the size of the logits themselves."""


class Audit(msgspec.Struct, frozen=True):
    """One check. `detail` says what was compared, or what was wrong."""

    name: str
    passed: bool
    detail: str


def run_audits(plan: JobPlan, replicas: Sequence[ReplicaResult], ranks: Sequence[RankResult]) -> list[Audit]:
    return [_outputs_equal(plan, replicas), _ranks_equal(plan, ranks), _pages_conserved(replicas)]


def _outputs_equal(plan: JobPlan, replicas: Sequence[ReplicaResult]) -> Audit:
    check = _tokens_equal if plan.exact else _logits_within_noise
    passed, detail = check(plan, replicas)
    return Audit("outputs_equal", passed, detail)


def _tokens_equal(plan: JobPlan, replicas: Sequence[ReplicaResult]) -> tuple[bool, str]:
    num_tokens = num_requests = 0
    for replica in replicas:
        off = {served.request_id: served.answer for served in replica.served["off"]}
        on = {served.request_id: served.answer for served in replica.served["on"]}
        asked = [ask.request_id for ask in plan.asks[replica.replica]]
        for request_id in asked:
            if off.get(request_id) is None or off.get(request_id) != on.get(request_id):
                return (
                    False,
                    f"request {request_id}: {off.get(request_id)} without, {on.get(request_id)} with cache",
                )
        num_requests += len(asked)
        num_tokens += sum(map(len, on.values()))
    return True, f"{num_tokens} tokens of {num_requests} greedy answers, token for token"


def _logits_within_noise(plan: JobPlan, replicas: Sequence[ReplicaResult]) -> tuple[bool, str]:
    """Lower precision: where the prompt is cut changes results, so equality of tokens is not to be had."""
    noise, on = (_worst([replica.noise[phase] for replica in replicas]) for phase in ("noise", "on"))
    # One unit in the last place of the largest logit: for models that another chunking does not change at all.
    unit = torch.finfo(DTYPES[plan.dtype]).eps * noise.max_logit
    bound = NOISE_FACTOR * noise.max_abs + unit
    expected = sum(len(served.answer) for replica in replicas for served in replica.served["off"])
    passed = on.max_abs <= bound and on.tokens == noise.tokens == expected
    detail = (
        f"{plan.dtype}: teacher-forced logits of {on.tokens} tokens differ by {on.max_abs:.3g} at most with the "
        f"cache; {noise.max_abs:.3g} between two cache-off runs with different chunks (allowed: {bound:.3g}); "
        f"largest logit is another token's {on.flipped} times, {noise.flipped} between the cache-off runs"
    )
    return passed, detail


def _worst(found: Sequence[LogitNoise]) -> LogitNoise:
    return LogitNoise(
        max(noise.max_abs for noise in found),
        max(noise.max_logit for noise in found),
        sum(noise.tokens for noise in found),
        sum(noise.flipped for noise in found),
    )


def _ranks_equal(plan: JobPlan, ranks: Sequence[RankResult]) -> Audit:
    by_rank = {result.rank: result for result in ranks}
    for rank in range(plan.tp * plan.dp):
        master = rank // plan.tp * plan.tp
        if rank not in by_rank or master not in by_rank:
            return Audit("ranks_equal", False, f"rank {rank} left no result")
        for what in ("results_digest", "outputs_digest", "steps"):
            if getattr(by_rank[rank], what) != getattr(by_rank[master], what):
                return Audit("ranks_equal", False, f"{what} of rank {rank} is not that of rank {master}")
    steps = sum(by_rank[replica * plan.tp].steps for replica in range(plan.dp))
    return Audit("ranks_equal", True, f"results of {steps} cache steps, and all outputs, on every rank")


def _pages_conserved(replicas: Sequence[ReplicaResult]) -> Audit:
    for replica in replicas:
        audit = replica.audit
        if replica.device_problem:
            return Audit("pages_conserved", False, f"replica {replica.replica}: {replica.device_problem}")
        if not audit.conserved:
            return Audit("pages_conserved", False, audit.problem or f"the store counts {audit}")
    audit = replicas[0].audit
    return Audit(
        "pages_conserved",
        True,
        f"{audit.free} free + {audit.ready} ready = {audit.num_pages} host pages; no lease, nothing reserved",
    )
