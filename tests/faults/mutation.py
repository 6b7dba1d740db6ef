"""Gates switched off: for each, a fault that only it sees."""

FEW = (
    "workloads.samples={prose: 2, retrieval: 3, tool_call: 0, copy: 3, multi_turn: 0}",
    "workloads.rounds=[1.0]",
    "workloads.noise_samples=1",
    "workloads.canary_samples=1",
    "workloads.max_scored_tokens=32",
    "workloads.probe={max_tokens: 128, decode_steps: 8, offset_steps: 1, max_batch: 17, requests: 1}",
    "workloads.load={batch: 2, context_tokens: 128, new_tokens: 4, warmup_steps: 1, budget_gib: 1.0, sequence_tokens: 1024}",
)
"""So few samples that nothing can pass, and enough for what is wrong in every request."""

ALONE: dict[str, str] = {
    "canary": "canary_without_effect",
    "probe": "rows_above_16",
    "allocation": "pool_twice_as_large",
}
"""Gate -> a fault that gets through without it."""


def name_of(gate: str) -> str:
    """Return the name in the record of what its fault gets without a gate."""
    return f"without {gate}"
