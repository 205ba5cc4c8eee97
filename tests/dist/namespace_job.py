"""One rank of a replica over two network namespaces. See test_namespaces.py."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from tests.cache.bench import Rank, slots_of, tokens_of
from tests.dist.agreeing import replica_of


def main() -> None:
    rank, size, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=size)
    replica = replica_of(rank, size, 2)
    bench = Rank(replica, num_kv_heads=size)
    tokens, slots = tokens_of(32), slots_of(0, 32)
    bench.compute(tokens, slots)
    bench.store("a", tokens, slots)
    bench.poison()
    num_tokens = bench.fetch("b", [*tokens, 1], slots)
    bench.drain()
    wrong = bench.wrong_tokens(tokens[:num_tokens], slots[:num_tokens])
    print(num_tokens, len(wrong), bench.cache.stats().channel, bench.cache.results_digest.hex(), flush=True)
    replica.min_int(0)
    bench.cache.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
