"""An engine beside its twin, the oracle under the engine's own policy."""
