"""One engine on its decode path: batches, rows, free generation, and what was measured with them."""
