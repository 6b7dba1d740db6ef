"""What every worker's script shares. It runs in another interpreter and imports nothing of kvgate."""
