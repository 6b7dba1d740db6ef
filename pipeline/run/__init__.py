"""What a command does: the chain of artifacts, the stages, the tables at the end."""
