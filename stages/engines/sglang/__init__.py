"""backend=sglang: SGLang, run in another Python interpreter."""
