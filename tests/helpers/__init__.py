"""Helpers shared by several test modules, by subject."""
