"""lm-evaluation-harness with engine bundles: the model `kvgate`, and lm-eval's command line with that model registered."""
