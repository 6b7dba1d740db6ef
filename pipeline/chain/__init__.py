"""Execution of a command: its jobs, its stages and their artifacts."""
