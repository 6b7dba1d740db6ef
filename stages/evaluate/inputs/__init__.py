"""Inputs of an evaluation: samples, their tokens, rounds, and the checks that judge answers."""
