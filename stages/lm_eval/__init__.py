"""lm-evaluation-harness over engine bundles: its model `kvgate`, and its command line with that model in it."""
