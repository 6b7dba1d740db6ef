"""Signatures of evidence, and strict reading of files that users write."""
