"""The way from the pipeline into `stages/`."""
