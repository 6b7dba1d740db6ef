"""The record that binds a judged engine to all its inputs, and its verification."""
