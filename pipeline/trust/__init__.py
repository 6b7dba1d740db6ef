"""Signatures of evidence, and files that people write."""
