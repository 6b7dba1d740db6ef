"""Content-addressed artifacts: digests, the store, and the hardware that timings depend on."""
