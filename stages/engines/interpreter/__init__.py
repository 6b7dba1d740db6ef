"""Engines whose library runs in another Python interpreter: a worker process that answers requests, and its client."""
