"""NVFP4 in torch."""

import torch
from torch import Tensor

from stages.policies.arithmetic_torch import Arithmetic, Options, Static, Stored, constant, groups_of
from stages.policies.table import NVFP4, NVFP4_MAGNITUDES, NVFP4_SCALES


class Nvfp4Blocks(Arithmetic):
    """E2M1 codes in blocks of channels. The E4M3 block scale is in units of the layer scale; a block's maximum becomes 6."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:
        assert static is not None, "NVFP4 has a layer scale"
        layer_scale, blocks = static.scale, groups_of(x, options.groups)
        scale = (blocks.abs().amax(-1) / (6.0 * layer_scale)).clamp(*NVFP4_SCALES).to(torch.float8_e4m3fn)
        codes = _encode(blocks / (scale.float() * layer_scale).unsqueeze(-1))
        low, high = codes.flatten(-2).chunk(2, dim=-1)
        return Stored((low + 16 * high).to(torch.uint8).view(torch.int8), scale, None)

    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:  # noqa: ARG002
        assert static is not None, "NVFP4 has a layer scale"
        assert stored.scale is not None, "NVFP4 has a scale per block"
        scale, byte = stored.scale.float() * static.scale, stored.codes.view(torch.uint8)
        codes = _decode(torch.cat([byte & 15, byte >> 4], dim=-1))
        return (groups_of(codes, scale.shape[-1]) * scale.unsqueeze(-1)).flatten(-2)


def _encode(steps: Tensor) -> Tensor:
    """Return the nearest codes 0 to 15 of scaled numbers, ties to even codes, saturating."""
    magnitude = steps.abs().clamp(max=6.0)
    unit = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    # Codes 0 to 4 have steps of 0.5 (up to 2), codes 4 to 6 steps of 1 (up to 4), and codes 6 and 7 a step of 2.
    return (magnitude / unit).round() + 2 * (unit.log2().round() + 1) + 8 * (steps < 0)


def _decode(codes: Tensor) -> Tensor:
    # A NaN index would crash the process on a GPU.
    magnitude = constant(NVFP4_MAGNITUDES, codes.device)[(codes % 8).nan_to_num().long()]
    return torch.where(codes >= 8, -magnitude, magnitude)


ARITHMETIC = Nvfp4Blocks(NVFP4)
