"""The bundle of TensorRT plans on disk, and the check that it is still what was built."""

from pathlib import Path

from pipeline.core.kv import KVPolicy
from pipeline.core.scales import KVScales
from stages.engines.base import Mode
from stages.engines.bundle import BuiltFor, BundleRecord, open_record, read_policy
from stages.engines.onnx.bundle import ModelInfo, Tensor
from stages.engines.tensorrt.library import Name
from stages.engines.tensorrt.shapes import Limits, Range
from stages.engines.tensorrt.weights import Weight

PLANS: dict[Mode, str] = {"prefill": "prefill.plan", "decode": "decode.plan"}


class PlanRecord(BundleRecord):
    """`bundle.json` of a bundle with TensorRT plans."""

    built_for: BuiltFor
    """Library, its version, and the compute capabilities that the plans have code for."""
    flags: list[str]
    """Flags of the network and the builder: set, or (with a minus) cleared."""
    graph_digest: str
    """sha256 of the decode graph before surgery, which the ONNX bundle records as well."""
    graphs: dict[str, str]
    """File name -> sha256 of each graph in the ONNX bundle."""
    twin: str
    """Digest of the ONNX bundle, which the reports of its evaluation cite."""
    plugins: dict[str, str]
    """Plugin node -> sha256 of its kernel's PTX, which is inside the plans."""
    native: dict[str, str]
    """Layer -> the reason why it keeps its function body instead of the plugin; empty in a build without the plugin."""
    stored: tuple[tuple[int, ...], ...] = ()
    """Layers whose tokens the plans store themselves, by the append that does; those of others are copied after a plan."""
    model: ModelInfo
    weights: list[Weight]
    """Inputs of both plans, of which `weights.bin` has the values."""
    max_batch: int
    max_tokens: int
    inputs: dict[str, list[Tensor]]
    """By plan, `prefill` or `decode`: the inputs that TensorRT reads in the graph, with names for dynamic dimensions."""
    outputs: dict[str, list[Tensor]]
    profiles: dict[str, dict[str, Range]]
    """By plan: the range of each dynamic dimension."""

    def limits(self, policy: KVPolicy) -> Limits:
        """Return what the plans are sized for."""
        return Limits(policy, self.max_batch, self.max_tokens, self.profiles["prefill"]["B"].largest)


def open_bundle(directory: Path, backend: Name) -> tuple[PlanRecord, KVPolicy, KVScales]:
    """Read and verify a bundle. Raises UserError naming the file that is missing or not the one that was built."""
    bundle = open_record(directory, PlanRecord, backend)
    policy, scales = read_policy(directory, bundle.model.shape)
    return bundle, policy, scales
