"""What a code is: an E4M3 without infinities."""

from pipeline.formats.spec import E4M3, Spec

FP8_E4M3 = Spec(
    "fp8_e4m3",
    "float",
    8,
    E4M3,
    448.0,
    neighbour="fp8_e5m2",
    native=(2, None),
    modelopt_bits=(4, 3),
    modelopt_name="FP8",
    vllm={"per_tensor": "fp8_e4m3", "per_head": "fp8_e4m3"},
    sglang="fp8_e4m3",
)
