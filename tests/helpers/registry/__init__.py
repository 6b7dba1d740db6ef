"""Evidence, candidates and registries."""
