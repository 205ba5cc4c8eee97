"""Agree: every rank of a replica completes the same tasks and frees the same pages in the same step."""

from mlkv.dist.agreement import NOTHING_AGREED, Agreed, Agreement
from mlkv.dist.exchange import GroupExchange
from mlkv.dist.protocol import Decision, Mark, Master, Member, Progress, Stream, TaskFailure
from mlkv.dist.rendezvous import init_process_group
from mlkv.dist.replica import Place, Replica

__all__ = [
    "NOTHING_AGREED",
    "Agreed",
    "Agreement",
    "Decision",
    "GroupExchange",
    "Mark",
    "Master",
    "Member",
    "Place",
    "Progress",
    "Replica",
    "Stream",
    "TaskFailure",
    "init_process_group",
]
