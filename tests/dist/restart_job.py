"""A job for torchrun: its rank 1 is killed once, and the restarted job does the work. See test_restart.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mlkv import Replica
from mlkv.dist import init_process_group
from tests.cache.bench import Rank, slots_of, tokens_of

NUM_PROMPTS = 6


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    init_process_group("gloo")
    replica = Replica.from_world(tp=dist.get_world_size(), deadline_s=10.0)
    generation = os.environ["TORCHELASTIC_RESTART_COUNT"]
    rank = Rank(replica, faults="delay=all:0-5ms,kill=rank1@25", agree={"deadline_s": 10.0})
    try:
        wrong = 0
        for at in range(NUM_PROMPTS):
            tokens = tokens_of(24, seed=at)
            slots = slots_of(0, 24)
            rank.compute(tokens, slots)
            rank.store(f"store{at}", tokens, slots)
            rank.poison()
            num_tokens = rank.fetch(f"fetch{at}", [*tokens, 1], slots)
            wrong += len(rank.wrong_tokens(tokens[:num_tokens], slots[:num_tokens])) + (num_tokens != 24)
        rank.drain()
        replica.min_int(0)
        outcome = f"wrong={wrong} steps={rank.cache.stats().steps} digest={rank.cache.results_digest.hex()}"
        rank.cache.close()
    except Exception as error:
        (folder / f"generation{generation}-rank{replica.rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    (folder / f"generation{generation}-rank{replica.rank}").write_text(outcome)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
