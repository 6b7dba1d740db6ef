"""Engines that are asked over HTTP."""
