"""What a terminal shows: progress, and the tables at the end."""
