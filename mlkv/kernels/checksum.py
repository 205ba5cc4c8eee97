"""The checksum of head slices (`page.payload_checksum`) as torch operations, for batches on any device."""

from __future__ import annotations

from functools import lru_cache

import torch

from mlkv.page import checksum_weights

_CPU_TEMPORARY_BYTES = 1 << 20  # stays in a core's second-level cache
_CUDA_TEMPORARY_BYTES = 32 << 20  # fills the chip, and is still a fraction of the staging


@lru_cache(maxsize=8)
def _weights(num_words: int, device: torch.device) -> torch.Tensor:
    # Made outside any inference_mode of the caller, because the cached tensor outlives it.
    with torch.inference_mode(False):
        return torch.from_numpy(checksum_weights(num_words).astype("int64")).to(device)


def payload_checksums(slices: torch.Tensor) -> torch.Tensor:
    """Checksums of a batch of head slices, equal to `page.payload_checksum` bit for bit.

    Args:
        slices: uint8 `[num_pages, num_heads, head_bytes]` with the last dimension contiguous, any strides over
            pages and heads that are multiples of 4; `head_bytes` a multiple of 4.

    Returns:
        int64 `[num_pages, num_heads]` on the same device; the bits are those of the unsigned sum.
    """
    num_pages, num_heads, head_bytes = slices.shape
    sums = torch.zeros((num_pages, num_heads), dtype=torch.int64, device=slices.device)
    if not sums.numel():
        return sums
    words = slices.view(torch.int32)
    weights = _weights(head_bytes // 4, slices.device)
    temporary_bytes = _CPU_TEMPORARY_BYTES if slices.device.type == "cpu" else _CUDA_TEMPORARY_BYTES
    step_words = max(1024, temporary_bytes // (8 * num_heads))
    step_pages = max(1, temporary_bytes // (8 * num_heads * min(step_words, head_bytes // 4)))
    for page in range(0, num_pages, step_pages):
        for at in range(0, head_bytes // 4, step_words):
            part = words[page : page + step_pages, :, at : at + step_words].to(torch.int64)
            # Signed 64-bit products and sums wrap around like the unsigned ones they stand for.
            part &= 0xFFFFFFFF
            part *= weights[at : at + step_words]
            sums[page : page + step_pages] += part.sum(dim=-1)
    return sums
