"""Which policy to use: the configuration and the records of the stages that search for one or compare them on paper."""
