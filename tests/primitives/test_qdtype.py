"""The table of quantized types: bounds, storage, identity, look-up."""

import copy
import pickle

import pytest
import torch

from qtorch.primitives import QDType, qdtype
from tests.refusals import refuses

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


@pytest.mark.parametrize("name", ["int8", "uint8", *WIDE, *FLOATS])
def test_bounds_are_those_of_torch_where_torch_has_the_type(name: str) -> None:
    kind, info = qdtype(name), (torch.finfo if name in FLOATS else torch.iinfo)(getattr(torch, name))
    assert (kind.quant_min, kind.quant_max, kind.bits) == (info.min, info.max, 8 if name in FLOATS else info.bits)
    assert kind.storage == getattr(torch, name)
    assert kind.is_floating_point == (name in FLOATS)
    assert kind.is_signed == (info.min < 0)


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
    refuses("is not a quantized type; known: int1, int2", lambda: qdtype(dtype))


@pytest.mark.parametrize("dtype", [None, 8, int, QDType])
def test_other_kinds_are_refused(dtype: object) -> None:
    refuses(r"expected a torch\.dtype, a name or a QDType", lambda: qdtype(dtype), TypeError)  # type: ignore[arg-type]
