"""An engine beside its reference, the oracle under the engine's own policy."""
