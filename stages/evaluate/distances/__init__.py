"""Distances between the answers and distributions of an engine and its baseline."""
