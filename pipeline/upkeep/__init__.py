"""What a work directory holds, what of it is needed, and what may go."""
