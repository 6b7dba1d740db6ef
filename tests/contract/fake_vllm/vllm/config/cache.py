"""Types of the cache."""

from typing import Literal

import vllm

if vllm.MODE == "no fp8":
    CacheDType = Literal["auto", "bfloat16"]
else:
    CacheDType = Literal["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "nvfp4"]
