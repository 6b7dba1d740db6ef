"""Pages of the cache: which sequence holds which, and how they lie in memory."""
