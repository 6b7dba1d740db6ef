"""Pipeline stages: each turns one artifact into the next."""
