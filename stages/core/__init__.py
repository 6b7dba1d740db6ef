"""Records, formats, policies and errors that every other package uses."""
