"""The decode path of one engine: batches, report rows, free generation, and stored measurements."""
