"""Every error mlkv raises on purpose. Catch `MLKVError` to catch them all."""

from __future__ import annotations


class MLKVError(Exception):
    """Base of all errors of this library."""


class ConfigError(MLKVError, ValueError):
    """A setting, layout or argument is wrong. The message names the field and what would be right."""


class StoreError(MLKVError):
    """The store refused a request. Nothing was changed by it."""


class StoreLost(StoreError):
    """The owner process of this host is gone. Its pages are unreachable; lookups answer with a miss."""


class DeadlineExceeded(MLKVError, TimeoutError):
    """Something that had a deadline did not happen in time. The message says what was waited for."""


class TierUnavailable(MLKVError):
    """A lower tier could not be used now. For engines that is a miss; the message says where to look."""


class CacheUsageError(MLKVError):
    """The facade was called in a way its contract does not allow. Nothing was changed by the call."""


class AgreementError(MLKVError):
    """Base of the errors that end a replica: its ranks can no longer agree."""


class RankLost(AgreementError):
    """A rank of the replica died, hung or raised.

    Attributes:
        rank: group rank of the lost rank within its replica.
        step: the engine step at which it was missed.
    """

    def __init__(self, rank: int, step: int, why: str) -> None:
        self.rank = rank
        self.step = step
        self.why = why
        super().__init__(f"rank {rank} of this replica was lost at step {step}: {why}")

    def __reduce__(self) -> tuple[type[RankLost], tuple[int, int, str]]:
        return type(self), (self.rank, self.step, self.why)


class RanksDiverged(AgreementError):
    """Two ranks of a replica made different calls between two steps, so their tasks no longer match.

    Attributes:
        rank: group rank that differs from the master.
        step: the engine step at which the difference was seen.
    """

    def __init__(self, rank: int, step: int, why: str) -> None:
        self.rank = rank
        self.step = step
        self.why = why
        super().__init__(f"rank {rank} of this replica diverged from the master at step {step}: {why}")

    def __reduce__(self) -> tuple[type[RanksDiverged], tuple[int, int, str]]:
        return type(self), (self.rank, self.step, self.why)


class MasterFailed(AgreementError):
    """The master could not decide a step; every rank of the replica receives its reason."""
