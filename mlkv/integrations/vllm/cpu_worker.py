"""vLLM's worker for CPUs, for torchrun jobs that share their host with other jobs, or have more ranks than cores.

    LLM(..., worker_cls="mlkv.integrations.vllm.cpu_worker.JobWorker")

On a CPU vLLM's ranks exchange tensors through shared memory, which it names after its communicator's init method
and the ranks. Under torchrun the former is always `env://`, so two jobs of equal size on one host open the same
memory, and one of them or both compute nonsense or hang. In that memory ranks wait without sleeping: where they
outnumber the cores, whoever is waited for may have to wait for a core until the kernel takes it from one that
waits, and each of the two exchanges per layer takes some milliseconds.
"""

from __future__ import annotations

import os

from vllm.v1.worker.cpu_worker import CPUWorker


class JobWorker(CPUWorker):  # type: ignore[misc]
    """As vLLM's, but its ranks' shared memory is of this job alone, and is not used when cores are too few."""

    def init_device(self) -> None:
        # vLLM takes what follows the last colon for the name; torch ignores parameters that it does not know.
        self.distributed_init_method = f"env://?job=:{memory_name()}"
        super().init_device()


def memory_name() -> str:
    """Equal on the ranks of one start of one job and on no others; not even on those when cores are too few.

    vLLM's ranks that find that their names differ talk through torch.distributed, where waiting takes no core.
    """
    name = f"torchrun-{os.environ['MASTER_PORT']}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > len(os.sched_getaffinity(0)):
        name += f"-{os.environ['RANK']}"
    return name
