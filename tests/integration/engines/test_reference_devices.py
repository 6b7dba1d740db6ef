"""The reference engine on another device than the CPU: a stand-in device without numbers that refuses to mix devices."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines.random_llama import static_scales
from helpers.kernels.engines import short_model
from helpers.policies.shipped import SHIPPED
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from stages.engines.reference import attention, engine, formats, placing
from stages.engines.reference.attention import AttentionPiece, Block, Fed
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.model import head
from stages.evaluate.conformance.explanation import faulty_references
from stages.policies.policy import Eviction, KVPolicy, LayerOverride, Window

DEVICE = torch.device("meta")
INT8 = SHIPPED["int8"]


def in_second_layer(shipped: str, policy: KVPolicy, **changes: object) -> KVPolicy:
    """Return a policy whose second layer has the formats of a shipped policy: each policy costs seconds here."""
    override = LayerOverride(layers=(1,), key=SHIPPED[shipped].key, value=SHIPPED[shipped].value)
    return policy.model_copy(update={"overrides": (override,), **changes})


EVICTION = Eviction(window_tokens=64)
WINDOW = Window(tokens=64, value=SHIPPED["fp8"].value)
POLICIES = [
    in_second_layer("int4_hadamard", SHIPPED["fp8k_int4v_aged"], recent_tokens=20, window=WINDOW, eviction=EVICTION),
    in_second_layer("llamacpp_q4_0", SHIPPED["int4_sinks"]),
    INT8.model_copy(update={"name": "h2o", "eviction": Eviction(window_tokens=64, heavy_tokens=64)}),
]


class OnDevice(TorchFunctionMode):
    """Refuses tensors created on the CPU, except plans, ids and positions, which are created there and then moved."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.zeros, torch.ones, torch.full, torch.empty):
            # a Hadamard matrix starts this way
            assert "device" in kwargs or args[0] == 1, f"{func.__name__} without a device"
        return func(*args, **kwargs)


def with_masks(block: Block, device: torch.device | str) -> Block:
    """Return a block with masks of the same shapes on a device."""

    def moved(piece: AttentionPiece) -> AttentionPiece:
        mask = piece.mask_RT
        return piece if mask is None else replace(piece, mask_RT=torch.empty(mask.shape, dtype=mask.dtype, device=device))

    return replace(block, pieces={key: tuple(map(moved, pieces)) for key, pieces in block.pieces.items()})


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The shapes of the tiny model's first two layers on the stand-in device, with 16-bit weights."""
    plan = attention.plan

    def planned(*given: Any) -> list[Block]:
        assert given[-1] == DEVICE
        with unset_fake_temporarily():
            blocks = plan(*given[:-1])
        return [with_masks(block, DEVICE) for block in blocks]

    def logits(self: TorchEngine, hidden: torch.Tensor) -> Any:
        found = head(self.model, hidden)
        assert (found.device, found.dtype) == (DEVICE, torch.float32)
        return np.zeros(tuple(found.shape), np.float32)

    class Generator:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def manual_seed(self, _: int) -> "Generator":
            return self

    monkeypatch.setattr(engine, "plan", planned)
    monkeypatch.setattr(attention.Finite, "check", lambda _: None)
    monkeypatch.setattr(TorchEngine, "_logits", logits)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "randn", lambda shape, generator, device: torch.empty(shape, device=device))  # noqa: ARG005
    model = short_model()
    with FakeTensorMode(allow_non_fake_inputs=True), OnDevice():
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE)
            for name, weight in module.named_parameters(recurse=False):
                short = torch.empty(weight.shape, dtype=torch.float16, device=DEVICE)
                module._parameters[name] = torch.nn.Parameter(short, requires_grad=False)
        monkeypatch.setattr(placing, "_shortest", lambda weight: weight)
        placing.shorten(model, DEVICE)
        yield model
    formats.hadamard.cache_clear()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_all_that_is_computed_lies_on_the_engines_device(policy: KVPolicy, elsewhere: Any) -> None:
    shape = TorchEngine.from_model(elsewhere, SHIPPED["fp16"]).shape
    reference = TorchEngine.from_model(elsewhere, policy, static_scales(policy, shape), prefill_chunk=128)
    text = list(range(100, 250))
    assert reference.forced(text, 146).shape == (4, reference.vocab_size)
    reference.replay([Fed(text, [(140, False), (2, True), (6, False), (2, True)]), Fed(text[:9], [(9, False)])], rounding=1e-4)
    handles, _ = reference.prefill([text, text[:1]])
    reference.decode(handles, [1, 2])
    reference.corrupt_key_scale(2.0)
    reference.decode(handles, [1, 2])
    for _, relative in faulty_references(reference):
        relative.forced(text[:20], 18)
