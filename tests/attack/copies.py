"""Copies, moves, files, and parameters made again."""

import copy
import functools
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from qtorch import load_quantized, quantize_, save_quantized
from qtorch.dtypes import QuantizedTensor
from qtorch.model.install import PreparedModule
from qtorch.training import TrainingWeight, convert
from tests.attack.operations import Refused, attempt, inputs, operation, outputs, same
from tests.attack.subject import K, N, Subject
from tests.movement.holding import through_file

GROUP = "Copies, moves and files"


def _warm(subject: Subject) -> nn.Linear:
    layer = subject.layer().eval()
    for _ in range(2):
        outputs(layer)
    return layer


@operation(GROUP, "`model.to('cpu')`, `float()`, `bfloat16()` while an output is alive")
def moved_beside_an_output(subject: Subject) -> None:
    layer = subject.layer()
    y = layer(inputs()[1].requires_grad_())
    layer.to("cpu")
    layer.float()
    layer.bfloat16()
    layer.float()
    assert layer.weight.dtype == torch.float32
    try:
        y.sum().backward()
    except RuntimeError as error:
        # Of torch, whose leaves are exchanged: the gradient has no place any more.
        if layer.weight.requires_grad and "poisoned by swap_tensors" in str(error):
            raise Refused(str(error)) from error
        raise


@operation(GROUP, "`type(p)(p.data, requires_grad=...)`, as accelerate does")
def made_again_by_its_class(subject: Subject) -> None:
    layer = _warm(subject)
    wanted, p = outputs(layer), layer.weight
    made = type(p)(p.data, requires_grad=p.requires_grad)
    assert type(made) is type(p)
    assert made.requires_grad == p.requires_grad
    layer._parameters["weight"] = made if isinstance(made, nn.Parameter) else nn.Parameter(made, p.requires_grad)
    same(outputs(layer), wanted, "made again", 0)
    vars(made)["tag"] = 1
    kwargs = {name: value for name, value in vars(p).items() if name not in vars(type(p))}
    assert set(kwargs) <= {*getattr(p, "inner_tensors", {}), *vars(p)}


@operation(GROUP, "`nn.Parameter(p, requires_grad=False)`")
def made_again_as_a_parameter(subject: Subject) -> None:
    layer = _warm(subject)
    wanted = outputs(layer)
    made = nn.Parameter(layer.weight, requires_grad=False)
    assert not made.requires_grad
    layer._parameters["weight"] = made
    same(outputs(layer), wanted, "made again", 0)


@operation(GROUP, "`p.requires_grad_()`, `p.requires_grad = True`, `model.requires_grad_()`")
def asked_to_train(subject: Subject) -> None:
    """A frozen weight refuses; nothing else can be meant by it."""
    errors = []
    for ask in (
        lambda layer: layer.weight.requires_grad_(),
        lambda layer: setattr(layer.weight, "requires_grad", True),
        lambda layer: layer.requires_grad_(),
        lambda layer: layer.weight.detach().requires_grad_(),
    ):
        layer = subject.layer()
        try:
            attempt(functools.partial(ask, layer), layer, "frozen quantized weight.*qat.*dequantize_.*LoRA")
        except Refused as error:
            errors.append(error)
            assert not layer.weight.requires_grad
        else:
            layer(inputs()[0]).sum().backward()
            assert layer.weight.grad is not None or not layer.weight.requires_grad
    assert len(errors) in (0, 4)
    assert bool(errors) != subject.trains
    if errors:
        raise errors[0]


@operation(GROUP, "`nn.Parameter(q)`, `load_state_dict(assign=True)` of parameters into a float model")
def flags_of_float_parameters(subject: Subject) -> None:
    """`requires_grad=True` by default, or as a float parameter has it: a frozen weight stays frozen."""
    layer = _warm(subject)
    made = nn.Linear(K, N).eval()
    made.load_state_dict(layer.state_dict(keep_vars=True), strict=False, assign=True)
    for weight in (nn.Parameter(layer.weight.detach()), made.weight):
        assert weight.requires_grad == subject.trains
    if not isinstance(layer, PreparedModule):
        same(outputs(made), outputs(layer), "what was loaded", 0)


@operation(GROUP, "attributes of a parameter: `quantize_`, `deepcopy`, `torch.save`, `load_quantized`")
def attributes_survive(subject: Subject) -> None:
    layer = subject.float_layer()
    layer.weight.tag = "mine"
    subject.quantize(layer)
    assert getattr(layer.weight, "tag", None) == "mine", "lost by quantize_"
    if not isinstance(layer.weight, QuantizedTensor):
        return  # a plain parameter, whose attributes torch's own deepcopy leaves out
    assert getattr(copy.deepcopy(layer).weight, "tag", None) == "mine", "lost by deepcopy"
    assert getattr(through_file(layer, weights_only=False).weight, "tag", None) == "mine", "lost by torch.save"
    if subject.trains:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_quantized(layer, path)
        made = nn.Linear(K, N)
        made.weight.tag = "of the model"
        load_quantized(made, path)
        assert getattr(made.weight, "tag", None) == "of the model", "lost by load_quantized"


@operation(GROUP, "weights in two modules", refuses=r"is shared by several modules, which would have a schedule each")
def tied(subject: Subject) -> None:
    if subject.name == "lora_qat":
        return
    model = nn.ModuleDict({"first": subject.float_layer(), "second": subject.float_layer(2)})
    model["second"].weight = model["first"].weight
    quantize_(model, subject.recipe)
    assert model["first"].weight is model["second"].weight
    made = copy.deepcopy(model)
    assert made["first"].weight is made["second"].weight
    if subject.trains and not isinstance(model["first"], PreparedModule):
        made.to(torch.bfloat16)
        assert made["first"].weight is made["second"].weight


NO_TABLES = r"embed: (adapters are for nn.Linear|takes the weights of nn.Linear)"


@operation(GROUP, "an embedding tied to a head, with a gradient, without, converted", refuses=NO_TABLES)
def tied_table(subject: Subject) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(N, K), "head": subject.float_layer()})
    model["head"].weight = model["embed"].weight
    quantize_(model, subject.recipe, targets="all")
    ids, x = torch.arange(N), inputs()[2]
    model["head"](x)  # starts ranges that follow

    def both() -> list[Tensor]:
        return [model["embed"](ids), model["head"](x)]

    wanted = [y.detach() for y in both()]
    with torch.no_grad():
        same(both(), wanted, "without a gradient", 0)
        if subject.trains:
            model.eval()
            wanted = both()
            quantize_(model, convert())
            same(both(), wanted, "converted")


@operation(GROUP, "`convert()`, `dequantize_`", refuses=r"^quantize_: nothing to quantize")
def back_to_floats(subject: Subject) -> None:
    from qtorch import dequantize_

    layer = _warm(subject)
    wanted = outputs(layer)
    if subject.trains:
        quantize_(layer, convert())
        assert type(layer) is nn.Linear
        same(outputs(layer), wanted, "converted", 2e-5)
    if isinstance(layer.weight, QuantizedTensor):
        dequantize_(layer)
    assert not isinstance(layer.weight, QuantizedTensor | TrainingWeight)
    same(outputs(layer), wanted, "in floating point", 0.6)


@operation(GROUP, "`weight_norm`, `prune`", refuses=r"parametriz|weight_norm|prun|not implemented for|dequantize")
def parametrized(subject: Subject) -> None:
    """What is computed with is the quantized result, or it is refused by name; it never turns the recipe off."""
    from torch.nn.utils import parametrize, prune

    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

    layer = subject.layer().eval()
    parametrize.register_parametrization(layer, "weight", Twice(), unsafe=True)
    y = outputs(layer)
    if isinstance(layer, PreparedModule):
        return
    wanted = subject.layer().eval()
    bound = 0.4 * subject.stochastic + 2e-5
    values = 2 * subject.values()
    same(y, outputs(subject.fresh(values, wanted)), "not the output of the quantized result", bound)
    pruned = subject.layer().eval()
    prune.l1_unstructured(pruned, "weight", amount=0.5)
    assert isinstance(pruned.weight, QuantizedTensor), "prune has turned the recipe off"
