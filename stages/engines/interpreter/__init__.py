"""Engines whose library runs in another Python interpreter: the worker process, and its client."""
