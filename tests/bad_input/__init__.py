"""Bad input: what a user can give wrongly, a table a kind, and the promise that holds for every one of them."""
