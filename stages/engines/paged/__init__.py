"""The paged cache: the pages of every sequence, and their layout in memory."""
