"""The PyTorch runtime's scales of an FP8 cache: always 1.0, regardless of the checkpoint."""

import numpy as np


class TrtllmAttention:
    def __init__(self, layer_idx: int) -> None:
        self.layer_idx = layer_idx
        self.kv_scale_quant_orig = np.ones(1, np.float32)
        self.kv_scale_orig_quant = 1.0 / self.kv_scale_quant_orig
