"""What a code is: an E5M2. ModelOpt refuses it."""

from pipeline.formats.spec import E5M2, Spec

FP8_E5M2 = Spec(
    "fp8_e5m2",
    "float",
    8,
    E5M2,
    57344.0,
    neighbour="fp8_e4m3",
    native=(3, None),
    vllm={"per_tensor": "fp8_e5m2"},
    sglang="fp8_e5m2",
)
