"""Reports, rows and evaluations for tests of gates."""
