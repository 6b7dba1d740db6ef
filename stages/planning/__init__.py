"""Choice of a policy: capacity of a memory budget, recommendation from evidence, and the estimated time of a verdict."""
