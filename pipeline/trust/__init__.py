"""Who may say what serves: signatures, and the policy that promotions keep to."""
