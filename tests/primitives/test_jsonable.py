"""The JSON codec of configuration objects."""

import contextlib
import enum
import json
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch import PerRow, QuantSpec, ZeroPointDomain
from qtorch.primitives import MappingType, MSERule, PercentileRule, PerGroup, Rounding, from_json, qdtype, to_json
from qtorch.primitives.files import parse_json
from qtorch.primitives.jsonable import MAX_DEPTH, jsonable
from qtorch.primitives.spec import LinearSpec, Scheme
from tests.attack.damage import mutate, text_of
from tests.fast_part import matrix_but
from tests.refusals import refuses

CONSTANTS = [*MappingType, *ZeroPointDomain, *Rounding, torch.float32, torch.int4, torch.float8_e4m3fn, qdtype("int4")]
PLAIN = [None, True, 3, 0.1, 1e-45, "per row", "a.b", (), (1, (2,)), {"k": (1,)}]


@pytest.mark.parametrize("value", [*CONSTANTS, *PLAIN], ids=str)
def test_round_trip_through_text(value: object) -> None:
    """Of specs, granularities and rules too, in `test_spec`."""
    back = from_json(json.loads(json.dumps(to_json(value))))
    assert back == value
    assert type(back) is type(value)


def test_lists_become_tuples() -> None:
    assert from_json(to_json([1, [2]])) == (1, (2,))


def test_every_field_is_written() -> None:
    assert to_json(MSERule()) == {"type": "MSERule", "steps": 41, "smallest": 0.5}
    assert to_json(PerRow()) == {"type": "PerRow"}
    assert to_json(torch.bfloat16) == "torch.bfloat16"
    assert to_json(MappingType.SYMMETRIC) == "MappingType.SYMMETRIC"
    assert to_json(qdtype("uint4")) == "QDType.uint4"


def test_a_class_of_ones_own() -> None:
    @jsonable
    @dataclass(frozen=True)
    class OnlyInThisTest:
        block: tuple[int, ...]
        dtype: torch.dtype

    value = OnlyInThisTest((1, 2), torch.float16)
    assert from_json(json.loads(json.dumps(to_json(value)))) == value
    assert jsonable(OnlyInThisTest) is OnlyInThisTest


def test_two_classes_of_one_name_are_refused() -> None:
    class PerRow(enum.Enum):
        A = 1

    refuses("the name 'PerRow' is already taken", lambda: jsonable(PerRow))
    refuses("PerRow has no JSON form", lambda: to_json(PerRow.A), TypeError)


@pytest.mark.parametrize("value", [torch.ones(1), lambda x: x, {1}, object()])
def test_no_json_form(value: object) -> None:
    refuses("has no JSON form; decorate the class with @jsonable", lambda: to_json(value), TypeError)


# --- data from anywhere ---

KEYS = st.one_of(st.just("type"), st.sampled_from(["dtype", "spec", "shape", "group_size", "table", "a"]))
WORDS = st.sampled_from(["PerGroup", "QuantSpec", "Scheme", "Rounding", "QDType.int8", "torch.int8", "torch.nn", "x."])
JSON_DATA = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
)


@settings(max_examples=100, deadline=None)
@given(JSON_DATA)
def test_any_data_is_read_or_refused(data: object) -> None:
    with contextlib.suppress(ValueError):
        json.dumps(to_json(from_json(data)))


@pytest.mark.parametrize("seed", matrix_but((0, 1), range(20)))
def test_damaged_data_is_read_or_refused(seed: int) -> None:
    """What is read has a hash, a name and a JSON form."""
    scale_spec = QuantSpec("int8", PerGroup(4), quant_min=-127)
    spec = QuantSpec("int4", PerGroup(32), scale_rule=PercentileRule(99.0), scale_spec=scale_spec)
    whole = to_json(Scheme(LinearSpec(spec, QuantSpec("int8")), (4, 64), torch.float32))
    rng, read = random.Random(seed), 0
    for _ in range(100):
        damaged, _ = mutate(whole, rng)
        try:
            made = from_json(parse_json(text_of(damaged)))
        except ValueError:
            continue
        read += 1
        assert repr(made)
        if isinstance(made, Scheme):
            assert hash(made) == hash(from_json(to_json(made)))
    assert 0 < read < 100


@pytest.mark.parametrize(("data", "message"), [
    ({"type": "PerGroup", "group_size": "32"}, "PerGroup.group_size takes an integer, got '32'"),
    ({"type": "PerGroup", "group_size": 32.0}, "PerGroup.group_size takes an integer, got 32.0"),
    ({"type": "PerGroup", "group_size": True}, "PerGroup.group_size takes an integer, got True"),
    ({"type": "PerBlock", "sizes": [1, 2.5]}, r"PerBlock.sizes takes tuple\[int, ...\], got \(1, 2.5\)"),
    ({"type": "PerAxis", "axis": []}, r"PerAxis.axis takes an integer, got \(\)"),
    ({"type": "PerAxis", "axis": {}}, "PerAxis.axis takes an integer, got "),
    ({"type": "FixedRangeRule", "low": float("nan"), "high": 1.0}, "a field has the value NaN"),
    ({"type": "Rounding"}, "unknown type 'Rounding'"),
    ({"type": ["PerRow"]}, r"unknown type \['PerRow'\]"),
    ({"type": None}, "unknown type None"),
    ({"type": "LinearSpec", "weight": None, "layout": {"a": [1]}}, "LinearSpec cannot be made from"),
    ({1, 2}, "takes JSON data, got a set"),
    ({"type": "PerGroup", "group_size": 4, "zeal": 1}, "PerGroup has no field zeal; the data was written by"),
    ("MappingType.DIAGONAL", "MappingType has no member 'DIAGONAL'"),
    ("torch.float33", "torch has no member 'float33'"),
    ("torch.load", "torch has no member 'load'"),
    ({"type": "PerColumn"}, "unknown type 'PerColumn'; known: .*PerRow, PerTensor"),
])  # fmt: skip
def test_what_is_refused(data: object, message: str) -> None:
    refuses(f"^from_json: {message}", lambda: from_json(data))


def test_what_a_class_refuses() -> None:
    with pytest.raises(ValueError, match="group_size is 0; it must be positive, or -1 for a whole row"):
        from_json({"type": "PerGroup", "group_size": 0})
    refuses("int99 is not a quantized type", lambda: from_json(to_json(QuantSpec("int8")) | {"dtype": "QDType.int99"}))


def test_depth() -> None:
    def nested(depth: int) -> object:
        tree: object = []
        for _ in range(depth):
            tree = [tree]
        return tree

    from_json(nested(MAX_DEPTH))
    refuses(f"from_json: the data is nested more than {MAX_DEPTH} deep", lambda: from_json(nested(MAX_DEPTH + 1)))
    refuses("nested too deep", lambda: parse_json("[" * 100_000 + "]" * 100_000))


def test_keys_that_are_there_twice() -> None:
    assert parse_json('{"a": [1, {"b": 2}]}') == {"a": [1, {"b": 2}]}
    refuses("the key 'b' occurs twice", lambda: parse_json('{"a": [1, {"b": 2, "c": 1, "b": 2}]}'))
