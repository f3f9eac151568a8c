"""torch.compile, torch.export and torch.func."""

import functools

import torch
from torch import Tensor, nn

import qtorch
from tests.attack.operations import inputs, operation, outputs, same
from tests.attack.subject import K, Subject

GROUP = "Compiler and function transforms"
BOUND = 1e-4


@operation(GROUP, "in-place operations on the output, compiled", few=True)
def compiled_in_place_on_the_output(subject: Subject) -> None:
    model = nn.Sequential(subject.layer(), nn.ReLU(inplace=True))
    compiled = torch.compile(model, backend="aot_eager")
    for shape in ((6, K), (2, 3, K)):
        results = []
        for run in (compiled, lambda x: model[0](x).relu()):
            x = inputs()[2][:6].reshape(shape).clone().requires_grad_()
            y = run(x)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), x)])
        same(*results, f"compiled, input {shape}", BOUND)


@operation(GROUP, "`torch.export`, run with and without gradients")
def exported(subject: Subject) -> None:
    model, x = subject.model().eval(), inputs()[2][:6].view(2, 3, K)
    with torch.no_grad():
        wanted = model(x)
    program = torch.export.export(model, (x,)).module()
    same([program(x)], [wanted], "with gradients", BOUND)
    same([program(x.clone().requires_grad_())], [wanted], "with the gradient of the input", BOUND)
    with torch.no_grad():
        same([program(x)], [wanted], "without gradients", BOUND)


class _Breaks(nn.Module):
    """Layers in a loop, with a graph break in it."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = x + layer(x).sum(-1, keepdim=True).tanh()
        return x


@operation(GROUP, "a graph break inside a loop", few=True)
def graph_break(subject: Subject) -> None:
    model = _Breaks([subject.layer(seed) for seed in (1, 2)]).eval()
    wanted = outputs(model)
    model.compile(backend="aot_eager")
    with torch.no_grad():
        same([model(x) for x in inputs()], wanted, "compiled", BOUND)


@operation(GROUP, "layers of two shapes, a step of training, compiled", few=True)
def two_shapes(subject: Subject) -> None:
    model = subject.model()
    before = [x.clone() for x in outputs(model)]
    model.compile(backend="aot_eager")
    x = inputs()[2].requires_grad_()
    model(x).square().mean().backward()
    assert x.grad is not None
    parameters = [p for p in model.parameters() if p.requires_grad]
    if parameters:
        torch.optim.SGD(parameters, lr=0.1).step()
        assert float((model(inputs()[2]) - before[2]).norm()) > 0


@operation(GROUP, "`quantize_` inside `torch.compile`", refuses=r"quantize_.*compile|compile.*quantize_", few=True)
def quantize_inside(subject: Subject) -> None:
    layer = subject.float_layer()

    @torch.compile(backend="eager")
    def run(x: Tensor) -> Tensor:
        qtorch.quantize_(layer, subject.recipe)
        return layer(x)

    x = inputs()[1]
    y = run(x)
    assert not isinstance(layer.weight, nn.Linear)
    assert y.shape == (3, layer.out_features)


@operation(GROUP, "`torch.func.grad` to the input", refuses=r"torch\.func|functorch|vmap")
def func_grad(subject: Subject) -> None:
    layer, x = subject.layer().eval(), inputs()[1]
    got = torch.func.grad(lambda x: layer(x).square().sum())(x)
    leaf = x.clone().requires_grad_()
    layer(leaf).square().sum().backward()
    assert leaf.grad is not None
    same([got], [leaf.grad], "the gradient")


@operation(GROUP, "`torch.utils.checkpoint`")
def checkpointed(subject: Subject) -> None:
    from torch.utils.checkpoint import checkpoint

    layer, found = subject.layer().eval(), []
    for run in (layer, *(functools.partial(checkpoint, layer, use_reentrant=how) for how in (False, True))):
        x = inputs()[1].requires_grad_()
        run(x).square().sum().backward()
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        found.append([leaf.grad for leaf in leaves if leaf.grad is not None])
        layer.zero_grad()
    x, trained = inputs()[1].requires_grad_(), [p for p in layer.parameters() if p.requires_grad]
    y = checkpoint(layer, x, use_reentrant=False).square().sum()
    found.append([grad for grad in torch.autograd.grad(y, [x, *trained], allow_unused=True) if grad is not None])
    for got in found[1:]:
        same(got, found[0], "a gradient")
