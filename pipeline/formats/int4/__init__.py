"""Integers of 4 bits, two to a byte."""
