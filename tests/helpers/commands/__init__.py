"""Runs of the command line, in processes, in forks and with fake stages."""
