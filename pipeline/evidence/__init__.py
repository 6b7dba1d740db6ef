"""What binds a judged engine to all that made it, and its verification."""
