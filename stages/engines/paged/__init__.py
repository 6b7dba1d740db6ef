"""The paged cache: bookkeeping of pages by sequence, and their layout in memory."""
