"""Content-addressed artifacts: the store, its locks, and work directories."""
