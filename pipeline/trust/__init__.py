"""Who may say what serves: signatures, the log of moves, the policy that promotions keep to."""
