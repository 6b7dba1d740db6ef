"""Records, formats, policies and errors that every other room uses. Imports no other room."""
