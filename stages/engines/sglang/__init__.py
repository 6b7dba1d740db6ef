"""backend=sglang: SGLang in an interpreter of its own."""
