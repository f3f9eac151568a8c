"""torch.compile where a graph cannot be whole: it gives what eager mode gives, and compiles no more than it must."""

import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import qtorch
from qtorch import quantize_
from tests.attack import training_recipes
from tests.attack.training_recipes import make_any
from tests.every_recipe import NAMES


def graph_break(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x.relu()


def data_dependent(x: Tensor) -> Tensor:
    return x / 2 if x.abs().sum().item() > 1e9 else x


def printing(x: Tensor) -> Tensor:
    print(x.shape)
    return x


class InLoop(nn.Module):
    """A break between layers that are called from the loop itself."""

    def __init__(self, between: Callable[[Tensor], Tensor] = graph_break) -> None:
        super().__init__()
        self.between = between
        self.layers = nn.ModuleList([nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 64)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


class Generator(InLoop):
    def outputs(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
            yield x

    def forward(self, x: Tensor) -> Tensor:
        *_, last = self.outputs(x)
        return last


class Try(InLoop):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            try:
                x = layer(x)
                torch._dynamo.graph_break()
            finally:
                x = x.relu()
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Nested(nn.Module):
    """Each block is a graph, the loop is none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


class Products(InLoop):
    """Products that are written out, and views of weights."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x @ layer.weight.t() + nn.functional.linear(x, layer.weight)
            torch._dynamo.graph_break()
        return x


MODULES: dict[str, Callable[[], nn.Module]] = {cls.__name__: cls for cls in (InLoop, Generator, Try, Nested, Products)}
MODULES |= {f.__name__: functools.partial(InLoop, f) for f in (data_dependent, printing)}


def quantized(module: str, name: str) -> nn.Module:
    model = MODULES[module]()
    quantize_(model, make_any(name))
    model(torch.randn(8, 64))
    return model.eval()


def compiled(model: nn.Module, how: str, backend: str) -> Callable[[Tensor], Tensor]:
    if how == "torch.compile":
        return torch.compile(model, backend=backend)
    model.compile(backend=backend)
    return model


def check(model: nn.Module, how: str, backend: str) -> None:
    inputs = [torch.randn(rows, 64) for rows in (4, 5, 7)]
    wanted = [(model(x), *gradients(model, model, x)) for x in inputs]
    run = compiled(model, how, backend)
    for x, (y, *of_all) in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(run(x), y, rtol=1e-4, atol=1e-4)
        for a, b in zip(gradients(run, model, x), of_all, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().amax()))
        with torch.no_grad():
            torch.testing.assert_close(run(x), y, rtol=1e-4, atol=1e-4)


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    leaves = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    found = torch.autograd.grad(run(x).square().mean(), leaves, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


BREAKS = [
    pytest.param(name, module, how, marks=() if (module, how) == ("InLoop", "m.compile") else pytest.mark.slow)
    for name in ("int8_dynamic_activation_int8_weight", "int8_mixed_precision_training")
    for module in MODULES
    for how in ("torch.compile", "m.compile")
]


@pytest.mark.parametrize(("name", "module", "how"), BREAKS)
def test_breaks(name: str, module: str, how: str) -> None:
    check(quantized(module, name), how, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *training_recipes.NAMES])
def test_breaks_in_a_loop_for_every_recipe(name: str) -> None:
    check(quantized("InLoop", name), "m.compile", "eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int4_weight_only", "qat"])
@pytest.mark.parametrize("module", ["InLoop", "Nested"])
def test_breaks_with_inductor(module: str, name: str) -> None:
    check(quantized(module, name), "torch.compile", "inductor")


@pytest.mark.parametrize("model", [nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.ReLU())], ids=["one", "many"])
def test_builtin_module_compiled_in_place(model: nn.Module) -> None:
    """Before 2.14 torch starts no graph at the forward of its own modules: products run as those of float ones do."""
    counts, x = [], torch.randn(3, 64)
    for made in (copy.deepcopy(model), model):
        if made is model:
            quantize_(model, qtorch.int8_weight_only())
        wanted, counter = made(x), CompileCounterWithBackend("eager")
        made.compile(backend=counter)
        torch.testing.assert_close(made(x), wanted)
        counts.append(counter.frame_count)
    assert counts == [int(torch.__version__ >= "2.14")] * 2


@pytest.mark.parametrize("kind", ["embedding", "conv"])
def test_breaks_around_tables_and_convolutions(kind: str) -> None:
    model = InLoop()
    model.layers = nn.ModuleList([nn.Embedding(30, 64) if kind == "embedding" else nn.Conv2d(32, 32, 3), nn.Tanh()])
    quantize_(model, {"layers.0": qtorch.int8_weight_only()})
    x = torch.randint(0, 30, (3, 4)) if kind == "embedding" else torch.randn(2, 32, 6, 6)
    wanted = model(x)
    model.compile(backend="eager")
    torch.testing.assert_close(model(x), wanted)


SHAPES = ("int4_weight_only", "nf4_weight_only", "int8_weight_only_quantized_training")


@pytest.mark.parametrize("name", ["int8_weight_only", *(pytest.param(name, marks=pytest.mark.slow) for name in SHAPES)])
def test_weights_of_several_shapes_as_arguments(name: str) -> None:
    """No parameters of a module, sizes of tensors become symbols on the second call; metadata is numbers."""
    run = torch.compile(lambda x, w: x @ w.t(), backend="aot_eager", fullgraph=True)
    for n, k in ((64, 64), (96, 64), (64, 96), (128, 128)):
        layer = nn.Linear(k, n, bias=False)
        quantize_(layer, make_any(name))
        x = torch.randn(5, k)
        weight = layer.weight.detach()
        torch.testing.assert_close(run(x, weight), nn.functional.linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["int8_weight_only", pytest.param("qat", marks=pytest.mark.slow)])
def test_training_steps_and_checkpointing(name: str) -> None:
    """backward() is run outside graphs too."""
    model = quantized("InLoop", name)
    head = nn.Linear(64, 1)
    x = torch.randn(8, 64)

    def step() -> Tensor:
        loss = head(model(x.clone().requires_grad_())).square().mean()
        loss.backward()
        return loss

    step()
    wanted = head.weight.grad.clone()
    head.weight.grad = None
    torch.compile(step, backend="eager")()
    torch.testing.assert_close(head.weight.grad, wanted)
    # In eager mode it is a row of the matrix.
    block = Block()
    quantize_(block, make_any(name))
    block(torch.randn(8, 64))
    block.eval()
    x = torch.randn(8, 64)
    run = torch.compile(lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False), backend="aot_eager")
    for a, b in zip(gradients(run, block, x), gradients(block, block, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mark", [False, True])
def test_one_graph_for_all_batch_sizes(mark: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    quantize_(model, qtorch.int8_dynamic_activation_int4_weight(group_size=32))
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True)
    for rows in (5, 6, 9, 17, 40):
        x = torch.randn(rows, 64)
        if mark:
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert counter.frame_count == (1 if mark else 2)


RECIPE = qtorch.int8_weight_only()


@pytest.mark.parametrize("change", [lambda m: quantize_(m, RECIPE), qtorch.dequantize_], ids=["quantize", "dequantize"])
def test_quantizing_in_a_graph(change: Callable[[nn.Module], object]) -> None:
    """Whole graphs refuse it by name; others break there, and go on with what it has made."""
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(3, 64)
    if change is qtorch.dequantize_:
        quantize_(model, RECIPE)

    def run(x: Tensor) -> Tensor:
        change(model)
        return model(x) + 1

    before = type(model[0].weight)
    with pytest.raises(Exception, match="replaces the parameters of a model: call it before the compiled function"):
        torch.compile(run, backend="eager", fullgraph=True)(x)
    assert type(model[0].weight) is before
    y = torch.compile(run, backend="eager")(x)
    assert type(model[0].weight) is not before
    torch.testing.assert_close(y, model(x) + 1)
