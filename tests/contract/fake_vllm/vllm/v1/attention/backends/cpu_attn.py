"""Attention on a CPU."""


class CPUAttentionBackend:
    supported_kv_cache_dtypes = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
