"""Choice of a policy: configuration and records of the stages that search for policies or compare policies on paper."""
