"""What a code is: -7 to 7, or 0 to 15 from a zero."""

from pipeline.formats.spec import PACKED, Spec

INT4 = Spec("int4", "integer", 4, PACKED, 7.0, native=(6, 7), modelopt_bits=4)
