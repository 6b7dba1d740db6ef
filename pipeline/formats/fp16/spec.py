"""What a code is: a float16, not scaled."""

from pipeline.formats.spec import FLOAT16, Spec

FP16 = Spec("fp16", "exact", 16, FLOAT16, native=(0, None), llamacpp="f16")
