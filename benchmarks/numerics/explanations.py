"""Why a claim does not hold, or is undecided, on a subject; and why the two subjects disagree.

Written by hand from the measurements: a test demands one for every such claim, and that none is left over.
"""

from benchmarks.numerics.subject import SubjectName

_NO_SINKS = (
    "This model does not park attention on its first tokens: the first 4 get {share:.2f} times what an even spread would give "
    "them, so nothing special is lost with them."
)

WHY: dict[SubjectName, dict[str, str]] = {
    "tiny": {
        "order: fp8 per token before int8 per token": (
            "E4M3 errs by up to 1/16 of every number, INT8 per token by up to 1/254 of the token's largest: E4M3 is the "
            "better one only where most numbers are below 1/16 of the largest, which eightfold outliers do not make them."
        ),
        "per token: fp8": (
            "A floating-point code is as precise for small numbers as for large ones, so that it hardly matters what its "
            "scale is, as long as nothing saturates."
        ),
        "keys: int4, natural": (
            "Key errors are rare and large, value errors small and everywhere: without outliers a few tokens carry the keys' "
            "whole mean, and the typical text suffers more from the values."
        ),
        "length: trained prose": (
            "Within what it was trained on no growth shows: the growth above belongs in part to a model that is less sure of "
            "itself beyond it."
        ),
        "length: retrieval": "Whether an answer is lost differs too much between prompts of one length.",
        "sinks: 4 exact": _NO_SINKS,
        "sinks: eviction": _NO_SINKS,
        "asymmetric: int8 per token": "A few tokens of one text carry most of the mean; the typical text gains.",
        "calibration: e4m3": (
            "Its keys reach {shipped_key:.0f}, well inside E4M3's 448: a scale of 1 only moves where the codes lie."
        ),
        "calibration: per head": (
            "Floating-point codes are as precise with one scale as with another, and the ranges of the heads differ by less "
            "than 2 times: which of two scales rounds better is chance, of which these intervals know nothing (they are about "
            "texts)."
        ),
    },
    "smollm2": {
        "order: fp8 per token before int8 per token": (
            "Its keys' largest channels are some 4 times the median one, so that INT8's even steps, 1/127 of a token's "
            "largest number, are finer than E4M3's, up to 1/8 of every number, nearly everywhere."
        ),
        "length: int8 per token": "The error does not grow: the slope is a fiftieth of the error per 1,000 tokens, downwards.",
        "length: fp8 per tensor": (
            "From 512 to 8,192 tokens the error stays where it is; it doubles before that, from a document's first tokens on."
        ),
        "length: int4 per token, rotated": "From 512 to 8,192 tokens the error stays where it is.",
        "length: int4 per token": (
            "The error falls a little, and the perplexity lost falls with it (from +4.4 to +3.0), as the perplexity itself "
            "does."
        ),
        "sinks: 4 exact": (
            "Attention goes to the first tokens ({share:.0f} times an even spread for the first four), but what matters is "
            "that they are seen: stored in INT4 they do their work."
        ),
        "asymmetric: int4 per tensor": (
            "Most numbers of a layer are far smaller than its largest. Symmetric codes round them to 0; the steps of an "
            "asymmetric range have no code at 0, so that small numbers are off by up to half a step."
        ),
        "calibration: e4m3": (
            "Its keys reach {shipped_key:.0f}, well inside E4M3's 448: a scale of 1 only moves where the codes lie."
        ),
        "calibration: loud keys": (
            "Also 16 times larger the keys reach {loud_key:.0f}, still inside E4M3's 448: nothing saturates."
        ),
        "calibration: e5m2": "E5M2 reaches 57,344 and is as coarse everywhere: the scale only moves where the codes lie.",
        "calibration: per head": (
            "Floating-point codes are as precise with one scale as with another: a scale per head only helps where heads "
            "saturate or fall below the smallest code."
        ),
        "vllm: groups": (
            "Values are nearly normal. From minimum to maximum 64 of them span 4.7 standard deviations, 15 steps of 0.31; the "
            "largest magnitude of 32 is 2.4 deviations, 7 steps of 0.34: 1.17 times the squared error at the same bytes."
        ),
        "vllm: rotated groups": (
            "Rotated channels are nearly normal, so that the steps are 0.31 and 0.34 of a deviation: the 1.17 of the values "
            "above, for keys as well."
        ),
    },
}
"""Explanation of a verdict other than HOLDS, by subject and claim; figures in braces are measured."""

DISAGREEMENTS: dict[str, str] = {
    "vllm: groups": "On the tiny model the same 1.1 to 1.2 does not show: its texts are too few for so small a difference.",
    "vllm: rotated groups": (
        "On the tiny model a few tokens with planted key outliers carry the mean: rotated, such a head is far from normal, and "
        "groups of 32 keep half of it apart from the largest."
    ),
    "nvfp4: 4over6": (
        "On the tiny model the planted channels are most of a block's error, and a few tokens most of the mean, which goes up "
        "or down with them; the typical text gains there as well. SmolLM2 has no such channels."
    ),
    "nvfp4: rotation": (
        "The same few tokens: the tiny model's typical text gains as much, 1.8 times, but its interval reaches below 1."
    ),
    "per token: fp8": (
        "The tiny model's error is so small (1.3e-4) that chance decides. SmolLM2's is forty times as large, and a scale "
        "per token takes a third of it away. Why was not looked into: a floating-point code should not care much."
    ),
    "length: int8 per token": (
        "The tiny model was trained on prose of 448 tokens, and what grows in its long documents is its own uncertainty. "
        "SmolLM2 was trained on 8,192 and shows no growth up to there. A KL that grows with the context is a property of "
        "a model beyond its training, not of a quantized cache."
    ),
    "length: fp8 per tensor": "As for INT8: no growth within what a model was trained on.",
    "length: int4 per token, rotated": "As for INT8: no growth within what a model was trained on.",
    "length: int4 per token": (
        "As for INT8. The published growth of the perplexity (+0.05 at 512 tokens to +0.52 at 16k) is not found either: "
        "SmolLM2 loses less perplexity at 4,096 to 8,192 tokens than at 16 to 512."
    ),
    "sinks: eviction": (
        "The tiny model parks no attention on its first tokens; SmolLM2 does, as StreamingLLM found of real models: "
        "without them a sliding window is ruined, and one exact first token is enough. Judge a policy with eviction on a "
        "real model only."
    ),
    "asymmetric: int4 per tensor": (
        "The tiny model's planted channels make its ranges one-sided, which a zero makes good. SmolLM2 has none, and "
        "there a zero costs the code at 0, to which most of its numbers round."
    ),
    "asymmetric: int8 per token": (
        "The tiny model's mean is carried by a few tokens of one text. SmolLM2's errors are spread evenly, and a zero "
        "halves them."
    ),
    "calibration: loud keys": (
        "The tiny model's planted outliers reach 1,640 in the loud variant and saturate at 448 without a calibrated "
        "scale; SmolLM2's keys have no such outliers and stay within it. A model with large keys needs the calibration; "
        "this one does not."
    ),
    "calibration: per head": (
        "The tiny model's verdict is of four layers and two KV heads, where which of two scales rounds better is chance. "
        "Over SmolLM2's 30 layers of three heads no difference is left."
    ),
}
"""A paragraph on each claim on which the tiny model and the real one disagree."""
