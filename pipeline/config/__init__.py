"""The typed configuration and its composition from conf/ and the command line."""
