"""Choice of a policy: capacity of a memory budget, recommendation from evidence, and search of policies."""
