"""Side-by-side measurements, each with its peer."""
