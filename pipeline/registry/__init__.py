"""Candidates, promotion, and where both are tracked."""
