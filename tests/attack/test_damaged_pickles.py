"""Pickles that were damaged, or made to do harm: `torch.load(weights_only=True)` refuses them, or gives what is sound.

QTORCH_FUZZ is the number of seeded cases; a failure names the command that repeats it.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import pickletools
import zipfile

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from qtorch import quantize_
from qtorch.dtypes import QuantizedTensor
from qtorch.dtypes.copying import rebuild
from tests.attack import workers
from tests.attack.battery import battery
from tests.attack.pickles import DAMAGES, Reduced, damaged
from tests.attack.sources import NAMES, source

COUNT = int(os.environ.get("QTORCH_FUZZ", "1000"))
PARTS = 2


@pytest.mark.parametrize("part", range(PARTS))
def test_every_seed(part: int) -> None:
    """Clear errors, or tensors with which everything works; no crash, no other exception, no memory of others."""
    bounds = [COUNT * i // PARTS for i in range(PARTS + 1)]
    found = workers.failures("tests.attack.pickles", bounds[part], bounds[part + 1] - bounds[part])
    assert not found, f"{len(found)} of {bounds[part + 1] - bounds[part]}:\n" + "\n".join(found[:40])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_damaged_is_sound(name: str) -> None:
    """So that a failure above is one of the damage."""
    original = source(name)
    assert original is not None
    file = io.BytesIO()
    torch.save(original, file)
    file.seek(0)
    assert battery(torch.load(file, weights_only=True)) is None


def test_cases_depend_on_their_seed_alone() -> None:
    assert [damaged(seed)[0] for seed in range(20)] == [damaged(seed)[0] for seed in range(20)]
    words = " ".join(damaged(seed)[0] for seed in range(400))
    assert all(
        word in words for word in ("scheme: shape", "state", "type name", "tensors: missing", "not_a_tensor", "deep")
    )
    assert len(set(DAMAGES)) == 10


def test_a_dying_process_is_a_failure() -> None:
    """The attack itself: a case that kills its process is found, and the cases after it run."""
    found = workers.failures("tests.attack.dying", 0, 5)
    assert found == [
        "python -m tests.attack.dying 1: the process died: SIGSEGV",
        "python -m tests.attack.dying 3: wrong",
        "python -m tests.attack.dying 4: ZeroDivisionError: division by zero",
        "python -m tests.attack.dying 4: the process died: exit status 1",
    ]


# --- the reproductions ---


def load(*objects: object) -> list[object]:
    file = io.BytesIO()
    torch.save(list(objects), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def crafted(weight: Tensor, *, shape: list[int] | None = None, state: object = None, **tensors: object) -> Reduced:
    """`weight` as a pickle with another shape in its scheme, other tensors or a state."""
    _, (kind, inner, scheme, requires_grad, is_parameter, own) = weight.__reduce_ex__(2)
    read = json.loads(scheme)
    read["shape"] = shape or read["shape"]
    arguments = (kind, {**inner, **tensors}, json.dumps(read), requires_grad, is_parameter)
    return Reduced(rebuild, (*arguments, own if state is None else state))


def weight(recipe: qtorch.quantize_api.Recipe, n: int = 256, k: int = 256) -> Tensor:
    layer = nn.Linear(k, n)
    quantize_(layer, recipe)
    return layer.weight


RECIPES = [
    qtorch.int8_weight_only(),
    qtorch.int4_weight_only(group_size=32),
    qtorch.int8_dynamic_activation_int8_weight(),
    qtorch.int8_dynamic_activation_int4_weight(group_size=32),
    qtorch.nf4_weight_only(),
]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])


@every_recipe
@pytest.mark.parametrize("shape", [[200000, 4096], [512, 256], [256, 512], [300, 256], [255, 256]], ids=str)
def test_a_scheme_of_another_shape(recipe: qtorch.quantize_api.Recipe, shape: list[int]) -> None:
    with pytest.raises(ValueError, match=r"shape|size"):
        load(crafted(weight(recipe), shape=shape))


@every_recipe
@pytest.mark.parametrize("rows", [0, 1, 255])
def test_scales_for_fewer_rows(recipe: qtorch.quantize_api.Recipe, rows: int) -> None:
    original = weight(recipe)
    with pytest.raises(ValueError, match="scale"):
        load(crafted(original, scale=original.scale[:rows].clone()))


@pytest.mark.parametrize("name", ["qdata", "scale", "scheme", "dequantize", "fast_linear", "__class__", "plain"])
def test_a_state_that_hides_what_was_checked(name: str) -> None:
    """An attribute that users may set stays; others are refused, or left out."""
    original = weight(qtorch.int8_weight_only())
    tiny = torch.zeros(1, dtype=torch.int8)
    try:
        (loaded,) = load(crafted(original, state={name: tiny, "note": "mine"}))
    except (ValueError, TypeError) as error:
        if name not in str(error):
            raise
        return
    assert isinstance(loaded, QuantizedTensor)
    assert loaded.note == "mine"
    assert vars(loaded).get(name) is not tiny
    assert torch.equal(loaded.qdata, original.qdata)
    assert battery(loaded) is None


def test_the_state_of_a_parameter() -> None:
    """torch's own function of this name may be in a pickle as well."""
    original = weight(qtorch.int8_weight_only())
    with_state = torch._utils._rebuild_parameter_with_state
    arguments = (crafted(original), False, None, {"qdata": torch.zeros(1, 256, dtype=torch.int8)})
    try:
        (loaded,) = load(Reduced(with_state, arguments))
    except (ValueError, TypeError, pickle.UnpicklingError):
        return
    for rows in (1, 3, 3):
        with pytest.raises((ValueError, RuntimeError), match=r"qdata|codes"):
            functional.linear(torch.randn(rows, 256), loaded)


@pytest.mark.parametrize("inner", ["qdata", "scale"])
def test_an_inner_tensor_that_a_pickle_changes_after_the_check(inner: str) -> None:
    """BUILD on a plain tensor is `set_`: the file itself may shrink a tensor that was checked before."""
    original = weight(qtorch.int8_weight_only())
    file = io.BytesIO()
    torch.save([original.qdata, original.scale, crafted(original)], file)
    loaded = torch.load(io.BytesIO(_shrunk(file.getvalue(), 0 if inner == "qdata" else 1)), weights_only=True)
    assert getattr(loaded[2], inner).shape == (1, 1)
    for rows in (1, 3, 64, 64):
        with pytest.raises((ValueError, RuntimeError), match=inner if inner == "scale" else r"qdata|codes"):
            functional.linear(torch.randn(rows, 256), loaded[2])
    with pytest.raises((ValueError, RuntimeError)):
        functional.embedding(torch.tensor([255]), loaded[2])


def _shrunk(file: bytes, index: int) -> bytes:
    """The file with opcodes at its end that call `set_` on tensor `index` of those it holds: one element is left."""
    source, target = zipfile.ZipFile(io.BytesIO(file)), io.BytesIO()
    with zipfile.ZipFile(target, "w") as new:
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename.endswith("/data.pkl"):
                data = data[:-1] + _set_one_element(data, index) + b"."
            new.writestr(entry, data)
    return target.getvalue()


def _set_one_element(data: bytes, index: int) -> bytes:
    """Opcodes: get the tensor, build it with (its storage, 0, (1, 1), (1, 1)), append it to the list that is on top."""
    operations = list(pickletools.genops(data))
    following = list(itertools.pairwise(operations))
    # What torch remembers: the name of a storage, before it is fetched; a tensor, after an OrderedDict of its hooks.
    storages = [before[1] for before, (operation, *_) in following if operation.name == "BINPERSID"]
    made = [after[1] for (operation, *_), after in following if operation.name == "REDUCE"]
    get = (b"h" + bytes([made[2 * index + 1]]), b"h" + bytes([storages[index]]))
    pair = b"K\x01K\x01\x86"
    return get[0] + b"(" + get[1] + b"QK\x00" + pair + pair + b"tb" + b"a"
