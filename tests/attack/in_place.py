"""Changes of a weight in place, by every public way: then a layer computes what one made from the new numbers does.

Each way is tried on a layer that was never called, on one that has been called until its kernel remembers it, and on
one whose float copy is kept.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import qtorch
from qtorch.dtypes import QuantizedTensor
from qtorch.kernels.cpu import variants
from qtorch.training import TrainingWeight
from tests.attack.operations import Operation, add, attempt, inputs, operation, outputs, same
from tests.attack.subject import SUBJECTS, Subject

GROUP = "Changes in place"

SPARSE = r"2:4 sparse|blocks in each row of blocks"
FROZEN = rf"{SPARSE}|frozen|not implemented for|copy_|dequantize|requires a|does not support|load_state_dict|assign"

NAMES_A_WAY = r"weight[\s\S]*(assign|dequantize|quantize_)"

Way = Callable[[nn.Linear, Tensor, Callable[[], nn.Linear]], object]
"""Of (a layer, the new values, what makes a layer of them)."""

BEFORE = {"never called": (0, 0), "called before": (4, 0), "a float copy is kept": (4, 1 << 26)}
"""(calls, `config.float_copy_bytes`)."""


def _change(way: Way, values: Callable[[Tensor], Tensor], refuses: str | None, subject: Subject) -> None:
    """`way` changes the weight to ``values(old)``."""
    for state, (calls, memory) in BEFORE.items():
        layer = subject.layer().eval()
        pristine = copy.deepcopy(layer)
        old = layer.weight.detach()
        old = (old.dequantize() if isinstance(old, QuantizedTensor) else old).clone()
        with _float_copies(memory, subject), torch.no_grad():
            for _ in range(calls):
                outputs(layer)
            new = values(old)
            made = functools.partial(subject.fresh, new, subject.layer())
            attempt(functools.partial(way, layer, new, made), layer, refuses)
            for _ in range(2):
                got = outputs(layer)
            with qtorch.config.patch(float_copy_bytes=0):
                same(got, outputs(copy.deepcopy(layer)), f"{state}: not the output of a copy of it")
                before = outputs(pristine)
                wanted = outputs(subject.fresh(new, pristine))
                if values is _to_other_row and (subject.stochastic or not subject.trains):  # others keep their codes
                    wanted = [torch.cat([y[:, :1], y0[:, 1:]], 1) for y, y0 in zip(wanted, before)]
                bound = 0.4 if subject.stochastic else 2e-5
                same(got, wanted, f"{state}: not the output of a layer with the new numbers", bound)
        weight = layer.weight
        assert tuple(weight.shape) == tuple(new.shape), f"{state}: its shape is {tuple(weight.shape)}"
        assert weight.requires_grad == pristine.weight.requires_grad, f"{state}: requires_grad has changed"


@contextlib.contextmanager
def _float_copies(memory: int, subject: Subject) -> Iterator[None]:
    """Copies are kept wherever a kernel can keep them."""
    forced = memory and subject.family in ("weight-only", "trains in codes")
    with qtorch.config.patch(float_copy_bytes=memory), variants.force("float") if forced else contextlib.nullcontext():
        yield


def _to_other(old: Tensor) -> Tensor:
    return torch.randn(old.shape, generator=torch.Generator().manual_seed(2)) / 3


def _to_other_row(old: Tensor) -> Tensor:
    return torch.cat([_to_other(old)[:1], old[1:]])


def _assign_data(layer: nn.Linear, values: Tensor) -> None:
    layer.weight.data = values


def _assign_weight(layer: nn.Linear, made: nn.Linear) -> None:
    layer.weight = nn.Parameter(made.weight.detach(), made.weight.requires_grad)


def _load(layer: nn.Linear, weight: Tensor, assign: bool = False) -> None:
    layer.load_state_dict({**layer.state_dict(), "weight": weight}, assign=assign)


WAYS: dict[str, tuple[str, str | None, Way]] = {
    "copy_float": ("`p.copy_(x)`, x in floating point", SPARSE, lambda layer, x, made: layer.weight.copy_(x)),
    "copy_quantized": (
        "`p.copy_(q)`, q quantized alike",
        None,
        lambda layer, x, made: layer.weight.copy_(made().weight),
    ),
    "copy_detached": ("`p.detach().copy_(x)`", SPARSE, lambda layer, x, made: layer.weight.detach().copy_(x)),
    "data_copy": ("`p.data.copy_(x)`", SPARSE, lambda layer, x, made: layer.weight.data.copy_(x)),
    "assign_data_float": ("`p.data = x`, x in floating point", FROZEN, lambda layer, x, made: _assign_data(layer, x)),
    "assign_data_quantized": (
        "`p.data = q`, q quantized alike",
        FROZEN,
        lambda layer, x, made: _assign_data(layer, made().weight.data),
    ),
    "add": ("`p.add_(1)`", FROZEN, lambda layer, x, made: layer.weight.add_(1.0)),
    "mul": ("`p.mul_(2)`", FROZEN, lambda layer, x, made: layer.weight.mul_(2.0)),
    "set_row": ("`p[0] = x`", FROZEN, lambda layer, x, made: layer.weight.__setitem__(0, x[0])),
    "set_item": ("`p[...] = x`", FROZEN, lambda layer, x, made: layer.weight.__setitem__(..., x)),
    "fill": ("`p.fill_(0.5)`", FROZEN, lambda layer, x, made: layer.weight.fill_(0.5)),
    "zero": ("`p.zero_()`", FROZEN, lambda layer, x, made: layer.weight.zero_()),
    "set_storage": ("`p.set_(x)`", FROZEN, lambda layer, x, made: layer.weight.set_(x)),
    "module_weight": ("`module.weight = nn.Parameter(q)`", None, lambda layer, x, made: _assign_weight(layer, made())),
    "load_quantized_state": (
        "`load_state_dict` of the same recipe",
        None,
        lambda layer, x, made: _load(layer, made().state_dict()["weight"]),
    ),
    "assign_quantized_state": (
        "`load_state_dict` of the same recipe, `assign=True`",
        None,
        lambda layer, x, made: _load(layer, made().state_dict()["weight"], assign=True),
    ),
    "load_float_state": (
        "`load_state_dict` of a float model",
        f"{SPARSE}|{NAMES_A_WAY}",
        lambda layer, x, made: _load(layer, x),
    ),
}
"""(title, what an error may say, the change)."""

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda old: old + 1, "mul": lambda old: old * 2, "set_row": _to_other_row, "fill": lambda old: old * 0 + 0.5,
    "zero": torch.zeros_like,
}  # fmt: skip
"""What the old ones become; other numbers in all other ways."""

for _name, (_title, _refuses, _way) in WAYS.items():
    _run = functools.partial(_change, _way, VALUES.get(_name, _to_other), _refuses)
    add(_name, Operation(GROUP, _title, _run))


# --- others ---
@operation(GROUP, "`p.data = x` of another shape", refuses=r"shape|size|data")
def assign_data_of_another_shape(subject: Subject) -> None:
    layer = subject.layer()
    attempt(lambda: setattr(layer.weight, "data", torch.zeros(3, 5)), layer, r"shape|size|data")
    if isinstance(layer.weight, QuantizedTensor):
        raise AssertionError(f"it is accepted, and the shape is {tuple(layer.weight.shape)}")


@operation(GROUP, "`p.copy_(x)` with NaN in x", refuses=r"NaN|infinite|finite")
def copy_of_nan(subject: Subject) -> None:
    """A frozen weight refuses it; a training weight shows it."""
    layer, values = subject.layer().eval(), subject.values(2)
    if isinstance(subject.recipe, qtorch.recipes.base.WeightRecipe):
        values = subject.recipe.prune(values)
    values[3, values[3].abs().argmax()] = float("nan")
    with torch.no_grad():
        attempt(lambda: layer.weight.copy_(values), layer, r"NaN|infinite|finite")
    assert subject.trains, "it is accepted"
    assert not bool(outputs(layer)[1].isfinite().all()), "no output says so"


@operation(GROUP, "`load_state_dict` of another recipe", refuses=NAMES_A_WAY)
def load_of_another_recipe(subject: Subject) -> None:
    """Nothing is requantized silently."""
    other = "int4_weight_only" if subject.name != "int4_weight_only" else "int8_weight_only"
    state = next(one for one in SUBJECTS if one.name == other).layer(2).state_dict()
    layer = subject.layer().eval()
    state = {**layer.state_dict(), "weight": state["weight"]}
    attempt(lambda: layer.load_state_dict(state), layer, NAMES_A_WAY)
    raise AssertionError("it is accepted, and requantized")


@operation(GROUP, "`optimizer.step()`", refuses=r"does not require|no gradient|frozen|empty parameter list")
def optimizer_step(subject: Subject) -> None:
    for memory in (0, 1 << 26):
        layer = subject.layer()
        with _float_copies(memory, subject):
            optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=50.0)
            before = outputs(layer)
            outputs(layer)
            layer(inputs()[2]).square().mean().backward()
            optimizer.step()
            got = outputs(layer)
            with qtorch.config.patch(float_copy_bytes=0):
                same(got, outputs(copy.deepcopy(layer)), "not the output of a copy of it")
            changed = float((got[2] - before[2]).norm() / before[2].norm())
            assert changed > 1e-3, "nothing has changed"
            if not subject.trains:
                assert layer.weight.grad is None


@operation(GROUP, "an optimizer's update with NaN")
def optimizer_step_with_nan(subject: Subject) -> None:
    """A training weight shows it; a frozen one has no part in it."""
    layer = subject.layer()
    if not layer.weight.requires_grad:
        return
    layer.weight.grad = torch.full(tuple(layer.weight.shape), float("nan"))
    torch.optim.SGD([layer.weight], lr=0.1).step()
    assert not bool(outputs(layer)[2].isfinite().any()), "the output is finite"


@operation(GROUP, "`load_state_dict` of this model into a float one", refuses=NAMES_A_WAY)
def load_into_a_float_model(subject: Subject) -> None:
    state = subject.layer(2).state_dict()
    layer = subject.float_layer()
    if any(isinstance(value, QuantizedTensor) and not isinstance(value, TrainingWeight) for value in state.values()):
        attempt(lambda: layer.load_state_dict(state), layer, NAMES_A_WAY)
        raise AssertionError("it is accepted: the model is in floating point again")
    # Weights in training are floats to a checkpoint; layers with a state of their own have keys that a float one lacks.
    layer.load_state_dict(state, strict=not isinstance(subject.layer(), qtorch.model.install.PreparedModule))


@operation(GROUP, "`load_state_dict(assign=True)` into a float model")
def assign_into_a_float_model(subject: Subject) -> None:
    """The model is quantized then, and frozen weights stay frozen."""
    source = subject.layer(2).eval()
    if isinstance(source, qtorch.model.install.PreparedModule):
        return
    layer = subject.float_layer().eval()
    layer.load_state_dict(source.state_dict(), assign=True)
    same(outputs(layer), outputs(source), "not the output of what was loaded", 0)
    assert layer.weight.requires_grad == source.weight.requires_grad, "a frozen weight requires a gradient"
    x = inputs()[1].requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
