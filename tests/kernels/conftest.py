from __future__ import annotations

import os

import torch

# Triton decides when its kernels are defined whether they run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
