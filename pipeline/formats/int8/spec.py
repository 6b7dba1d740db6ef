"""What a code is: -127 to 127, or 0 to 255 from a zero."""

from pipeline.formats.spec import PACKED, Spec

INT8 = Spec("int8", "integer", 8, PACKED, 127.0, native=(4, 5), modelopt_bits=8, modelopt_name="INT8")
