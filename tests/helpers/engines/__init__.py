"""Bundles, engines and interpreters of every backend."""
