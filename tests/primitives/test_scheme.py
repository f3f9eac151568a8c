"""Scheme: the metadata of a quantized tensor."""

import copy
import json
import pickle

import torch

from qtorch.primitives import LinearSpec, PerGroup, PerToken, QuantSpec, from_json, to_json
from qtorch.primitives.spec import Scheme

SPEC = LinearSpec(QuantSpec("int4", PerGroup(32)), QuantSpec("int8", PerToken()))
SCHEME = Scheme(SPEC, (64, 128), torch.bfloat16)


def test_equal_schemes_are_one_key() -> None:
    again = Scheme(SPEC, torch.Size((64, 128)), torch.bfloat16)
    assert again == SCHEME
    assert hash(again) == hash(SCHEME)
    assert again.shape == (64, 128)
    assert type(again.shape) is tuple


def test_each_field_tells_schemes_apart() -> None:
    others = {
        Scheme(LinearSpec(SPEC.weight), (64, 128), torch.bfloat16),
        Scheme(SPEC, (128, 64), torch.bfloat16),
        Scheme(SPEC, (64, 128), torch.float16),
    }
    assert len(others | {SCHEME}) == 4


def test_copies_are_equal() -> None:
    through_text = from_json(json.loads(json.dumps(to_json(SCHEME))))
    pickled = pickle.loads(pickle.dumps(SCHEME))
    for copied in (through_text, pickled, copy.deepcopy(SCHEME), copy.copy(SCHEME)):
        assert copied == SCHEME
        assert hash(copied) == hash(SCHEME)


def test_shorthands() -> None:
    assert SCHEME.weight is SPEC.weight
    assert SCHEME.activation is SPEC.activation
    assert SCHEME.layout is None
