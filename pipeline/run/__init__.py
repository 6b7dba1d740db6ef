"""What a command does: the chain of artifacts, the stages."""
