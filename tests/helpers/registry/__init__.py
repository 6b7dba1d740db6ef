"""Stores, evidence, candidates and registries."""
