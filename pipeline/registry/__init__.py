"""Candidates, their promotion, and the tracking store."""
