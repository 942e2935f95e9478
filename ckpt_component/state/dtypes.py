"""The dtypes of torch by name: their widths, and their names in safetensors files. Imports no torch."""

from __future__ import annotations

#: Bytes of one element, by the name after `torch.`; those of less than a byte fill one.
WIDTHS = {
    **dict.fromkeys(("uint8", "int8", "bool", "qint8", "quint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu"), 1),
    "float4_e2m1fn_x2": 1,
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "bcomplex32", "qint32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}

#: Names in safetensors files.
SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
