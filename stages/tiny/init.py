"""Initializes the tiny model: a plain Llama whose initial weights already hold the wiring of n-gram induction.

From a random start retrieval does not emerge within tens of minutes on a CPU core; from this structured start it does.
Training is free to change every weight. The residual stream (hidden size 128) is divided as

    0            a constant, from which the heads that look back a fixed distance make their queries and keys
    1..8         the token's code: a short vector, spread so that different tokens' codes are far apart
    9..56        six slots of 8: the codes of the tokens 1, 2, ... 6 positions back
    57..127      the token's content, which the copying heads carry to the output

Layer 0 has one head per lag for slots 1 to 4, and layer 1 fills slots 5 and 6. Layers 2 and 3 attend to the positions
that the same tokens precede: they match the query's slots l with the key's slots l + 1, in the slow rotary pairs, which
hardly turn within the trained context.

Legend: H = query heads, G = KV heads, D = head_dim, C = hidden size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

CODE = 8
NUM_SLOTS = 6
CONTENT = 1 + CODE * (1 + NUM_SLOTS)
SIGMA = 0.5
"""Standard deviation of a content coordinate."""
CONSTANT = 2.0
CODE_NORM = 2.0
LOOK_BACK_GAIN = 1.6
FAST_PAIRS = 6
MATCH_GAIN = 2.0
READ_GAIN = 0.5
COPY_GAIN = 1.0
NOISE = 0.02
FINAL_NORM = 0.15

MATCHES = {(2, 0): (1, 2, 3, 4), (2, 1): (0, 2, 3, 4), (3, 0): (0, 1, 2, 3)}
"""(layer, KV head) -> the query's slots; the key's slots are one further back. Slot 0 is the token itself."""


def slot(lag: int) -> slice:
    """Return the residual coordinates that hold the code of the token `lag` positions back."""
    return slice(1 + CODE * lag, 1 + CODE * (lag + 1))


def spread_codes(count: int, generator: torch.Generator) -> Tensor:
    """Return `count` unit vectors (count, CODE), spread by mutual repulsion."""
    codes = torch.nn.functional.normalize(torch.randn(count, CODE, generator=generator), dim=-1)
    for _ in range(200):
        cosines = codes @ codes.T
        cosines.fill_diagonal_(-1.0)
        push = torch.softmax(20.0 * cosines, dim=-1) @ codes
        codes = torch.nn.functional.normalize(codes - 0.1 * push, dim=-1)
    return codes


def orthogonal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return a random matrix (rows, columns) with orthonormal rows; rows <= columns."""
    columns_by_rows: Tensor = torch.linalg.qr(torch.randn(columns, rows, generator=generator)).Q
    return columns_by_rows.T


def look_back_query(lag: int, inverse_frequencies: Tensor) -> Tensor:
    """Return a query (head_dim,) whose product with keys of ones in the fast pairs' first halves peaks `lag` tokens back."""
    half = inverse_frequencies.numel()
    query = torch.zeros(2 * half)
    angle = -lag * inverse_frequencies[:FAST_PAIRS]
    query[:FAST_PAIRS] = angle.cos()
    query[half : half + FAST_PAIRS] = angle.sin()
    return query


def slow_dims(head_dim: int, index: int) -> list[int]:
    """Return the CODE head dimensions of the index-th block of slow rotary pairs; the last block is the slowest."""
    half = head_dim // 2
    first = half // 2 + index * CODE // 2
    pairs = range(first, first + CODE // 2)
    return [*pairs, *(half + pair for pair in pairs)]


@dataclass(frozen=True)
class Projections:
    """Views of one layer's attention weights, by head."""

    q_HDC: Tensor
    k_GDC: Tensor
    v_GDC: Tensor
    o_CHD: Tensor

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return len(self.q_HDC) // len(self.k_GDC)

    def queries(self, kv_head: int) -> range:
        """Return the query heads of a KV head."""
        return range(kv_head * self.group, (kv_head + 1) * self.group)


def look_back(
    weights: Projections, kv_head: int, lags: dict[int, int], slots: tuple[int, ...], inverse_frequencies: Tensor
) -> None:
    """Let each query head h of a KV head copy slots from `lags[h]` tokens back to the slots `lags[h]` further on."""
    targets = [lags[head] for head in weights.queries(kv_head)]
    weights.k_GDC[kv_head, :FAST_PAIRS, 0] += LOOK_BACK_GAIN
    for block, source in enumerate(slots):
        dims = slice(block * CODE, (block + 1) * CODE)
        weights.v_GDC[kv_head, dims, slot(source)] += READ_GAIN * torch.eye(CODE)
        for head in weights.queries(kv_head):
            # Heads that write the same slot write equal parts of it.
            weights.o_CHD[slot(source + lags[head]), head, dims] += torch.eye(CODE) / targets.count(lags[head])
    for head in weights.queries(kv_head):
        weights.q_HDC[head, :, 0] += LOOK_BACK_GAIN * look_back_query(lags[head], inverse_frequencies)


def match(weights: Projections, kv_head: int, slots: tuple[int, ...]) -> None:
    """Let a KV head's queries attend to the keys whose slots, one further back, equal the query's `slots`."""
    for block, source in enumerate(slots):
        dims = slow_dims(weights.k_GDC.shape[1], block)
        weights.k_GDC[kv_head][dims, slot(source + 1)] += MATCH_GAIN * torch.eye(CODE)
        for head in weights.queries(kv_head):
            weights.q_HDC[head][dims, slot(source)] += MATCH_GAIN * torch.eye(CODE)


def attend_to_similar_tokens(weights: Projections, kv_head: int, generator: torch.Generator) -> None:
    """Set Q = K, so that a head attends to tokens that resemble the current one."""
    _, head_dim, hidden = weights.k_GDC.shape
    shared = orthogonal(head_dim, hidden, generator)
    weights.k_GDC[kv_head] += shared
    for head in weights.queries(kv_head):
        weights.q_HDC[head] += shared


def carry_content(weights: Projections, kv_head: int, generator: torch.Generator) -> None:
    """Set O = V^T on the content coordinates, so that the content of attended tokens moves towards the output."""
    _, head_dim, hidden = weights.k_GDC.shape
    value_DC = orthogonal(head_dim, hidden - CONTENT, generator)
    weights.v_GDC[kv_head, :, CONTENT:] += value_DC
    for head in weights.queries(kv_head):
        weights.o_CHD[CONTENT:, head, :] += COPY_GAIN / weights.group * value_DC.T


@torch.no_grad()
def structured_start(model: LlamaForCausalLM, seed: int) -> None:
    """Overwrite the weights of a new model in place with the structured start of `seed`."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    heads, kv_heads, shape = (
        config.num_attention_heads,
        config.num_key_value_heads,
        (config.head_dim, config.hidden_size),
    )
    inverse_frequencies = model.model.rotary_emb.inv_freq.float()

    embedding = model.model.embed_tokens.weight
    embedding.zero_()
    embedding[:, 0] = CONSTANT
    embedding[:, slot(0)] = CODE_NORM * spread_codes(config.vocab_size, generator)
    embedding[:, CONTENT:].normal_(0.0, SIGMA, generator=generator)
    model.model.norm.weight.fill_(FINAL_NORM)

    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            linear.weight.normal_(0.0, NOISE, generator=generator)
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            linear.weight.normal_(0.0, 1.0 / math.sqrt(linear.in_features), generator=generator)
        layer.mlp.down_proj.weight.mul_(1.0 / math.sqrt(2 * config.num_hidden_layers))
        weights = Projections(
            q_HDC=attention.q_proj.weight.view(heads, *shape),
            k_GDC=attention.k_proj.weight.view(kv_heads, *shape),
            v_GDC=attention.v_proj.weight.view(kv_heads, *shape),
            o_CHD=attention.o_proj.weight.view(config.hidden_size, heads, config.head_dim),
        )
        for kv_head in range(kv_heads):
            if index == 0:
                look_back(weights, kv_head, {head: head + 1 for head in range(heads)}, (0,), inverse_frequencies)
            elif (index, kv_head) == (1, 0):
                look_back(weights, kv_head, dict.fromkeys(range(heads), 2), (3, 4), inverse_frequencies)
            else:
                carry_content(weights, kv_head, generator)
                if (index, kv_head) in MATCHES:
                    match(weights, kv_head, MATCHES[index, kv_head])
                else:
                    attend_to_similar_tokens(weights, kv_head, generator)
