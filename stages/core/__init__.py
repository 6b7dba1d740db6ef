"""Errors, strict records, files, digests and hardware: modules that every other package uses."""
