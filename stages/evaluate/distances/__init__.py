"""How far an engine's answers and distributions are from the baseline's, as numbers."""
