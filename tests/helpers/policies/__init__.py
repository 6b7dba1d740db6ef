"""KV policies, number formats and tensors to store."""
