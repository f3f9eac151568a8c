"""Damaged pickles of quantized tensors: what `rebuild` is called with, changed in every way that a file can change it.

`run` is what `workers` calls.
"""

import copy
import io
import json
import pickle
import random
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtorch.dtypes import QuantizedTensor, copying
from qtorch.dtypes.copying import rebuild
from tests.attack import damage, sources
from tests.attack.battery import battery

REFUSALS = (ValueError, TypeError, pickle.UnpicklingError)
"""What `torch.load` may raise."""

Arguments = list[Any]
TYPE_NAME, TENSORS, SCHEME, REQUIRES_GRAD, IS_PARAMETER, STATE = range(6)

NOT_TENSORS: list[Any] = [None, 0, 1.5, True, "qdata", b"qdata", [], {}, (1, 2), torch.float32, torch.device("cpu")]


class Reduced:
    """An object that a pickle makes by this call."""

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        self.reduced = function, tuple(arguments)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.reduced


def run(seed: int) -> str | None:
    """What is wrong with the case `seed`; None if nothing is."""
    torch.manual_seed(seed)
    what, file = damaged(seed)
    found = _load_and_use(file)
    return None if found is None else f"{what}: {found}"


def _load_and_use(file: bytes) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(io.BytesIO(file), weights_only=True)
    except REFUSALS as error:
        return None if str(error) else f"torch.load: {type(error).__name__} without a message"
    except Exception as error:
        # Of tensors that are no tensors torch says so itself.
        by_qtorch = any("/qtorch/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))
        return f"torch.load: {type(error).__name__}: {error}" if by_qtorch else None
    for value in loaded:
        if isinstance(value, QuantizedTensor) and (wrong := battery(value)):
            return wrong
    return None


def damaged(seed: int) -> tuple[str, bytes]:
    """(what was changed, the file) of a case."""
    pick = random.Random(seed)
    name = pick.choice(sources.NAMES)
    original = sources.source(name)
    assert original is not None
    _, arguments = original.__reduce_ex__(2)
    changed = [copy.copy(argument) for argument in arguments]
    changes = [pick.choice(DAMAGES) for _ in range(pick.choice([1, 1, 1, 2]))]
    words = []
    for change in changes:
        try:
            words.append(change(changed, pick))
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError, KeyError) as error:
            words.append(f"{change.__name__} cannot follow ({error})"[:60])
    objects = pick.choice(WRAPPED)(changed, pick) if pick.random() < 0.1 else [Reduced(rebuild, changed)]
    file = io.BytesIO()
    torch.save(objects, file)
    return f"{name}: {'; '.join(words)}", file.getvalue()


# --- changes to the arguments of `rebuild`: each says what it did ---
def type_name(arguments: Arguments, pick: random.Random) -> str:
    names = ["AffineQuantizedTensor", "LUTQuantizedTensor", "UintxTensor", "ConvWeight", "MasterWeight"]
    names += ["FakeQuantizedWeight", "CodesWeight", "TableCodesWeight", "BitnetWeight"]
    names += ["TrainingWeight", "QuantizedTensor"]
    names += ["Parameter", "Tensor", "dict", ""]
    arguments[TYPE_NAME] = pick.choice([*names, *names, None, 3, ["AffineQuantizedTensor"], {}])
    return f"type name {arguments[TYPE_NAME]!r}"


def one_tensor(arguments: Arguments, pick: random.Random) -> str:
    tensors = arguments[TENSORS]
    name = pick.choice(list(tensors))
    change = pick.choice(TENSOR_CHANGES)
    changed = change(copying._of_bytes(tensors[name]), pick)
    tensors[name] = copying._as_bytes(changed) if type(changed) is Tensor else changed
    return f"{name} {change.__name__.strip('_')}"


def table_of_tensors(arguments: Arguments, pick: random.Random) -> str:
    tensors = arguments[TENSORS]
    names = list(tensors)
    what = pick.choice(["missing", "extra", "renamed", "swapped", "none at all", "of one storage", "no dict", "a key"])
    if what == "missing":
        del tensors[pick.choice(names)]
    elif what == "extra":
        extra = ("scheme", "fast_linear", "dequantize", "zero_point", "act_scale", "act_zero_point", "table")
        tensors[pick.choice(["more", "scale_scale", "scale_mean", "master", "__class__", *extra])] = torch.ones(1, 1)
    elif what == "renamed":
        tensors[pick.choice(["scale", "scales", "qdata", "table"])] = tensors.pop(pick.choice(names))
    elif what == "swapped":
        one, other = pick.choice(names), pick.choice(names)
        tensors[one], tensors[other] = tensors[other], tensors[one]
    elif what == "none at all":
        tensors.clear()
    elif what == "of one storage":
        tensors[pick.choice(names)] = tensors[pick.choice(names)]
    elif what == "no dict":
        arguments[TENSORS] = pick.choice([list(tensors.values()), *NOT_TENSORS])
    else:
        tensors[pick.choice([0, None, (1,)])] = torch.ones(1)
    return f"tensors: {what}"


def scheme_field(arguments: Arguments, pick: random.Random) -> str:
    scheme, what = damage.mutate(json.loads(arguments[SCHEME]), pick)
    arguments[SCHEME] = damage.text_of(scheme)
    return f"scheme: {what}"


def scheme_shape(arguments: Arguments, pick: random.Random) -> str:
    """A shape that the tensors have not: smaller, larger, much larger, of another rank or kind."""
    scheme = json.loads(arguments[SCHEME])
    shape = list(scheme["shape"])
    axis = pick.randrange(len(shape))
    shape[axis] = pick.choice([0, 1, -1, shape[axis] // 2, shape[axis] + 1, shape[axis] * 2, 3 * 10**6, 2**40, 2**63])
    if pick.random() < 0.3:
        shape = pick.choice([shape[::-1], shape[1:], [*shape, 1], [1, *shape], [shape[axis]] * 2, [200000, 4096], []])
    scheme["shape"] = shape
    arguments[SCHEME] = json.dumps(scheme)
    return f"scheme: shape {shape}"


def scheme_dtype(arguments: Arguments, pick: random.Random) -> str:
    scheme = json.loads(arguments[SCHEME])
    names = ("bfloat16", "float16", "float64", "int8", "uint8", "bool", "complex64", "float8_e4m3fn", "int4", "nothing")
    scheme["dtype"] = pick.choice([*(f"torch.{name}" for name in names), "float32", None, 8])
    arguments[SCHEME] = json.dumps(scheme)
    return f"scheme: dtype {scheme['dtype']}"


def scheme_text(arguments: Arguments, pick: random.Random) -> str:
    text = arguments[SCHEME]
    cut = pick.randrange(len(text))
    what, arguments[SCHEME] = pick.choice(
        [
            ("cut", text[:cut]),
            ("one letter", text[:cut] + pick.choice('0{["x:,9-') + text[cut + 1 :]),
            ("deep", "[" * 100_000),
            ("deep", '{"type":' * 20_000),
            ("a list", "[1, 2]"),
            ("null", "null"),
            ("a number", "1e999"),
            ("NaN", text.replace("32", "NaN")),
            ("of another tensor", sources.source(pick.choice(sources.NAMES)).__reduce_ex__(2)[1][SCHEME]),
            ("no text", pick.choice(NOT_TENSORS)),
            ("empty", ""),
        ]
    )
    return f"scheme: {what}"


def flags(arguments: Arguments, pick: random.Random) -> str:
    which = pick.choice([REQUIRES_GRAD, IS_PARAMETER])
    arguments[which] = pick.choice([True, False, None, 2, "yes", [], torch.ones(2), {}, 1.5])
    return f"{'requires_grad' if which == REQUIRES_GRAD else 'is_parameter'} {arguments[which]!r}"


HIDING = ("qdata", "scale", "zero_point", "master", "table", "scheme", "dequantize", "fast_linear", "__class__")
HIDING += ("__dict__", "linear", "plain", "trains", "shape", "dtype", "data", "grad", "grad_fn", "_is_param", "t")
HIDING += ("_made", "requires_grad", "_base", "_version", "device", "_backward_hooks", "__torch_function__")
HIDING += ("inner_tensors",)


def state(arguments: Arguments, pick: random.Random) -> str:
    name = pick.choice(HIDING)
    value = pick.choice([torch.ones(1, dtype=torch.int8), torch.ones(1, 1), "text", None, 0, {}, arguments[SCHEME]])
    arguments[STATE] = pick.choice([{name: value}] * 6 + [{0: value}, {None: 1}, [(name, value)], 3, "state", None])
    return f"state {str(arguments[STATE])[:60]}"


def count_of_arguments(arguments: Arguments, pick: random.Random) -> str:
    if pick.random() < 0.5:
        arguments.pop(pick.randrange(len(arguments)))
        return "an argument less"
    arguments.insert(pick.randrange(len(arguments) + 1), pick.choice(NOT_TENSORS))
    return "an argument more"


DAMAGES = [
    *[one_tensor] * 8, *[table_of_tensors] * 2, *[scheme_field] * 6, *[scheme_shape] * 5, scheme_dtype,
    *[scheme_text] * 2, flags, *[state] * 3, type_name, count_of_arguments,
]  # fmt: skip


# --- changes to one inner tensor ---
def _fewer_rows(tensor: Tensor, pick: random.Random) -> Tensor:
    return tensor[: pick.choice([0, 1, tensor.shape[0] // 2, tensor.shape[0] - 1])].clone()


def _fewer_columns(tensor: Tensor, pick: random.Random) -> Tensor:
    return tensor[..., : pick.choice([0, 1, tensor.shape[-1] // 2, tensor.shape[-1] - 1])].clone()


def _more(tensor: Tensor, pick: random.Random) -> Tensor:
    axis = pick.randrange(tensor.dim())
    return torch.cat([tensor.view(torch.int8) if tensor.itemsize == 1 else tensor] * pick.choice([2, 3]), axis)


def _one_element(tensor: Tensor, pick: random.Random) -> Tensor:
    return tensor.flatten()[:1].reshape(pick.choice([(), (1,), (1, 1), (1, 1, 1)])).clone()


def _in_another_shape(tensor: Tensor, pick: random.Random) -> Tensor:
    return pick.choice([tensor.flatten(), tensor[None], tensor[..., None], tensor.reshape(-1, *tensor.shape[:1])])


def _in_other_strides(tensor: Tensor, pick: random.Random) -> Tensor:
    twice = torch.stack([tensor, tensor], -1)
    large = torch.zeros(4096, dtype=tensor.dtype)
    return pick.choice(
        [
            twice[..., 0],  # elements apart
            torch.stack([tensor, tensor])[1],  # with an offset
            tensor.transpose(0, -1).contiguous().transpose(0, -1),
            tensor.t() if tensor.dim() == 2 else tensor,
            tensor.flatten()[:1].reshape([1] * tensor.dim()).expand(tensor.shape),  # one number for all
            large.as_strided(tensor.shape, [1] * tensor.dim()),  # rows that overlap
        ]
    )


def _in_another_dtype(tensor: Tensor, pick: random.Random) -> Tensor:
    names = ("int8", "uint8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64")
    dtype = getattr(torch, pick.choice([*names, "complex64", "float8_e4m3fn", "float8_e5m2"]))
    return tensor.view(dtype) if dtype.itemsize == tensor.itemsize and pick.random() < 0.5 else tensor.to(dtype)


def _of_other_numbers(tensor: Tensor, pick: random.Random) -> Tensor:
    new = tensor.clone()
    generator = torch.Generator().manual_seed(pick.randrange(2**31))
    raw = new.view(torch.uint8) if new.dim() else new.reshape(1).view(torch.uint8)
    count = pick.choice([1, raw.numel()])
    raw.flatten()[:count] = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return new


def _not_finite(tensor: Tensor, pick: random.Random) -> Tensor:
    value = pick.choice([float("nan"), float("inf"), -1.0, 0.0, 1e30])
    return torch.full_like(tensor, value) if tensor.is_floating_point() else torch.full_like(tensor, 127)


def _of_another_kind(tensor: Tensor, pick: random.Random) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: tensor.to("meta"),
        lambda: tensor.float().to_sparse(),
        lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
        lambda: sources.source(pick.choice(sources.NAMES)),
        lambda: torch.nn.Parameter(tensor, requires_grad=False),
        lambda: torch.nn.Parameter(tensor.float(), requires_grad=True),
        lambda: torch.complex(tensor.float(), tensor.float()).conj(),
        lambda: torch.empty(0),
    ]
    return pick.choice(kinds)()


def _not_a_tensor(tensor: Tensor, pick: random.Random) -> Any:
    return pick.choice(NOT_TENSORS)


TENSOR_CHANGES = [
    *[_fewer_rows, _fewer_columns, _more, _one_element] * 2, _in_another_shape, _in_other_strides, _in_another_dtype,
    _of_other_numbers, _not_finite, _of_another_kind, _not_a_tensor,
]  # fmt: skip


# --- the call inside others that torch.load allows ---
def _with_state_of_a_parameter(arguments: Arguments, pick: random.Random) -> list[Any]:
    hidden = {pick.choice(HIDING): pick.choice([torch.ones(1, dtype=torch.int8), "text", None])}
    inner = Reduced(rebuild, arguments)
    with_state = torch._utils._rebuild_parameter_with_state  # type: ignore[attr-defined]
    return [Reduced(with_state, (inner, False, OrderedDict(), hidden))]


def _as_a_parameter(arguments: Arguments, pick: random.Random) -> list[Any]:
    inner = Reduced(rebuild, arguments)
    rebuilt = torch._utils._rebuild_parameter  # type: ignore[attr-defined]
    return [Reduced(rebuilt, (inner, pick.choice([True, False, None]), OrderedDict()))]


def _as_a_tensor_of_itself(arguments: Arguments, pick: random.Random) -> list[Any]:
    whole = Reduced(rebuild, arguments)
    tensors = dict(arguments[TENSORS]) if isinstance(arguments[TENSORS], dict) else {"qdata": None}
    tensors[next(iter(tensors), "qdata")] = whole
    return [Reduced(rebuild, [arguments[TYPE_NAME], tensors, *arguments[SCHEME:]])]


def _next_to_another(arguments: Arguments, pick: random.Random) -> list[Any]:
    return [Reduced(rebuild, arguments), sources.source(pick.choice(sources.NAMES)), Reduced(rebuild, arguments)]


WRAPPED = [_with_state_of_a_parameter, _as_a_parameter, _as_a_tensor_of_itself, _next_to_another]
