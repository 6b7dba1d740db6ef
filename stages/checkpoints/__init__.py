"""Checks and descriptions of Hugging Face checkpoints, from their JSON and headers, without torch or transformers.

A checkpoint is refused with a UserError that names `model.path`, the problem (with the key of config.json) and the fix.
"""
