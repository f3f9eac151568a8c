"""The table of quantized types: bounds, storage, identity, look-up."""

import copy
import pickle
from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline

from qtorch.primitives import QDType, qdtype

INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 9)]
FLOATS = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
WIDE = ["int16", "int32"]


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_bounds_follow_from_the_bits(name: str) -> None:
    kind = qdtype(name)
    assert kind.quant_max - kind.quant_min == 2**kind.bits - 1
    assert kind.quant_min == (-(2 ** (kind.bits - 1)) if kind.is_signed else 0)
    assert kind.is_signed == name.startswith("int")
    assert kind.storage == (torch.int8 if kind.is_signed else torch.uint8)
    assert not kind.is_floating_point


@pytest.mark.parametrize("name", ["int8", "uint8", *WIDE])
def test_bounds_are_those_of_torch_where_torch_has_the_type(name: str) -> None:
    kind, info = qdtype(name), torch.iinfo(getattr(torch, name))
    assert (kind.quant_min, kind.quant_max, kind.bits) == (info.min, info.max, info.bits)
    assert kind.storage == getattr(torch, name)


@pytest.mark.parametrize("name", FLOATS)
def test_float8_bounds_are_those_of_torch(name: str) -> None:
    kind, info = qdtype(name), torch.finfo(getattr(torch, name))
    assert (kind.quant_min, kind.quant_max, kind.bits) == (info.min, info.max, 8)
    assert kind.storage == getattr(torch, name)
    assert kind.is_floating_point
    assert kind.is_signed


@pytest.mark.parametrize("name", [*INTEGERS, *FLOATS, *WIDE])
def test_one_object_per_name(name: str) -> None:
    kind = qdtype(name)
    assert kind.name == repr(kind) == name
    assert qdtype(getattr(torch, name)) is qdtype(f"torch.{name}") is qdtype(kind) is kind
    assert copy.deepcopy(kind) is copy.copy(kind) is pickle.loads(pickle.dumps(kind)) is kind
    assert len({kind, qdtype(name)}) == 1


def test_a_type_is_frozen() -> None:
    with pytest.raises(AttributeError):
        qdtype("int8").bits = 7  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "int23", ""])
def test_other_dtypes_are_refused(dtype: torch.dtype | str) -> None:
    with pytest.raises(ValueError, match="is not a quantized type; known: int1, int2"):
        qdtype(dtype)


@pytest.mark.parametrize("dtype", [None, 8, int, QDType])
def test_other_kinds_are_refused(dtype: object) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.dtype, a name or a QDType"):
        qdtype(dtype)  # type: ignore[arg-type]


def test_error_text() -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the text follows)
        qdtype(torch.float64)
    assert_expected_inline(
        fill(str(error.value), 96),
        """\
torch.float64 is not a quantized type; known: int1, int2, int3, int4, int5, int6, int7, int8,
uint1, uint2, uint3, uint4, uint5, uint6, uint7, uint8, float8_e4m3fn, float8_e4m3fnuz,
float8_e5m2, float8_e5m2fnuz, float6_e3m2, float6_e2m3, float5_e2m2, float5_e3m1, float4_e2m1,
float3_e2m0, float6_e5m0, float6_e4m1, float6_e1m4, float6_e0m5, float5_e4m0, float5_e1m3,
float5_e0m4, float4_e3m0, float4_e1m2, float4_e0m3, float4_e3m0n, float4_e2m1n, float4_e1m2n,
float4_e0m3n, midrise1, midrise2, midrise3, midrise4, midrise5, midrise6, midrise7, midrise8,
midrise9, midrise10, midrise11, midrise12, midrise13, midrise14, midrise15, midrise16,
midrise17, midrise18, midrise19, midrise20, midrise21, midrise22, int9, int10, int11, int12,
int13, int14, int15, int16, int17, int18, int19, int20, int21, int22, int32""",
    )
