"""What a code is: a bfloat16, not scaled."""

from pipeline.formats.spec import BFLOAT16, Spec

BF16 = Spec("bf16", "exact", 16, BFLOAT16, native=(1, None))
