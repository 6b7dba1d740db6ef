"""Terminal output: results, progress, tables and suggested commands."""
