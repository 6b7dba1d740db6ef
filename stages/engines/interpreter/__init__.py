"""Engines in an interpreter of their own: a process that answers requests, and an engine over it."""
