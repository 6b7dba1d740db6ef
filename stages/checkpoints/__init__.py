"""Checks and descriptions of Hugging Face checkpoints, from their JSON and headers, without torch or transformers.

A refusal is a UserError whose message names `model.path`, the problem (with the key of config.json) and the fix.
"""
