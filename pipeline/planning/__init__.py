"""How many tokens and requests a memory budget holds under each policy, and which policy to take: arithmetic and evidence."""
