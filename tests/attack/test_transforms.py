"""torch.func over quantized layers, for every recipe: what a loop, or autograd, gives; else an error that says why."""

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import qtorch
from tests.attack import training_recipes
from tests.attack.training_recipes import make_any
from tests.every_recipe import NAMES
from tests.refusals import refuses


def model_of(name: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    qtorch.quantize_(model, make_any(name))
    return prepared(model)


def prepared(model: nn.Module) -> nn.Module:
    """Learned and observed scales start from the first batch; then nothing is data-dependent."""
    model(torch.randn(8, 64))
    return model.eval()


def close(got: Tensor, wanted: Tensor) -> None:
    assert wanted.abs().amax() > 0
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4 * float(wanted.abs().amax()))


def energy(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


def gradient(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(energy(model)(x), x)[0]


every = pytest.mark.parametrize("name", [*NAMES, *training_recipes.NAMES])


@every
def test_vmap_gives_what_a_loop_gives(name: str) -> None:
    model, x = model_of(name), torch.randn(3, 5, 64)
    # Rows of very different sizes: a scale that examples shared would show.
    x *= torch.tensor([1.0, 30.0, 0.01]).reshape(3, 1, 1)
    for example, got in zip(x, vmap(model)(x), strict=True):
        close(got, model(example))
    for column, got in zip(x.unbind(1), vmap(model, in_dims=1)(x), strict=True):
        close(got, model(column))
    close(vmap(vmap(model))(x), torch.stack([torch.stack([model(row) for row in rows]) for rows in x]))
    with torch.no_grad():
        model(x)
        model(x)  # whatever a layer keeps for its next call
        close(vmap(model)(x), torch.stack([model(rows) for rows in x]))


@every
def test_modes_that_see_operators(name: str) -> None:
    """A graph of make_fx has the operators of a layer, not the numbers that it gave once; FakeTensorMode and selective
    checkpointing see them too."""
    model, x = model_of(name), torch.randn(5, 64)
    with torch.no_grad():
        model(x)  # whatever a layer keeps for its next call
    close(make_fx(model)(x)(2 * x), model(2 * x))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.empty(3, 64)).shape == (3, 64)
    if name in NAMES:  # others have no forward mode
        close(torch.func.linearize(model, x)[1](2 * x), jvp(model, (x,), (2 * x,))[1])
    aten = torch.ops.aten
    contexts = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default])
    kept = functools.partial(checkpoint, model, use_reentrant=False, context_fn=contexts)
    close(gradient(kept, x := torch.randn(300, 64)), gradient(model, x))


@every
def test_gradients_per_example_of_weights_and_adapters(name: str) -> None:
    model, x = model_of(name), torch.randn(3, 64)
    wanted = torch.stack([gradient(model, row) for row in x])
    close(vmap(grad(energy(model)))(x), wanted)
    close(grad(lambda x: vmap(model)(x).square().sum())(x), wanted)
    model, x = model_of(name), torch.randn(64)
    part = lambda x: model(x)[::16]  # noqa: E731
    close(jacrev(part)(x), torch.autograd.functional.jacobian(part, x))
    model, x = model_of(name), torch.randn(3, 64)
    adapters = {"a": torch.randn(64, 4) / 8, "b": torch.randn(4, 64)}

    def loss(adapters: dict[str, Tensor], x: Tensor) -> Tensor:
        return (model(x @ adapters["a"] @ adapters["b"]) + x).square().sum()

    got = vmap(grad(loss), in_dims=(None, 0))(adapters, x)
    for i, row in enumerate(x):
        leaves = {key: value.clone().requires_grad_() for key, value in adapters.items()}
        for key, wanted in zip(adapters, torch.autograd.grad(loss(leaves, row), list(leaves.values())), strict=True):
            close(got[key][i], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8_weight_only", "int8_dynamic_activation_int4_weight", "nf4_weight_only", "qat"])
def test_functional_call_compiled(name: str) -> None:
    model, x = model_of(name), torch.randn(3, 64)
    compiled = torch.compile(lambda state, x: functional_call(model, state, x), backend="aot_eager", fullgraph=True)
    close(compiled(dict(model.named_parameters()), x), model(x))


@pytest.mark.parametrize("name", training_recipes.NAMES)
def test_gradients_of_parameters_in_training(name: str) -> None:
    model, x = model_of(name), torch.randn(3, 64)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        if type(parameter) is nn.Parameter and not parameter.any():  # adapters, which start at zero
            nn.init.normal_(parameter, std=0.1)
    got = torch.autograd.grad(energy(vmap(model))(x), parameters)
    wanted = torch.autograd.grad(sum(energy(model)(row) for row in x), parameters)
    assert parameters
    for a, b in zip(got, wanted, strict=True):
        close(a, b)
    model, x = model_of(name), torch.randn(64)
    refuses(r"use torch.func.vjp or jacrev", lambda: jvp(model, (x,), (x,)), NotImplementedError)
    with pytest.raises(RuntimeError, match="second derivative of a layer in training"):
        grad(lambda x: grad(energy(model))(x).square().sum())(x)
    x.requires_grad_()
    (first,) = torch.autograd.grad(energy(model)(x), x, create_graph=True)
    refuses(r"once_differentiable|second derivative", lambda: first.square().sum().backward(), RuntimeError)


@pytest.mark.parametrize("name", NAMES)
def test_forward_mode_and_second_derivatives_of_a_frozen_model(name: str) -> None:
    """The transpose of reverse mode: <J v, u> = <v, J' u>."""
    model, x, v, u = model_of(name), torch.randn(3, 64), torch.randn(3, 64), torch.randn(3, 64)
    y, tangent = jvp(model, (x,), (v,))
    close(y, model(x))
    close((tangent * u).sum(), (vjp(model, x)[1](u)[0] * v).sum())
    close(jacfwd(lambda few: model(torch.cat([few, x[0, 4:]])))(x[0, :4]), jacrev(model)(x[0])[:, :4])
    model, x = model_of(name), torch.randn(64)

    def smooth(few: Tensor) -> Tensor:
        return model(torch.cat([few, x[4:]])).tanh().square().sum()

    close(hessian(smooth)(x[:4]), torch.autograd.functional.hessian(smooth, x[:4]))


@pytest.mark.parametrize("name", ["int8_mixed_precision_training", "qat", "bitnet_training"])
def test_gradient_of_a_weight_that_hides_its_recipe_is_refused(name: str) -> None:
    model, x = model_of(name), torch.randn(3, 64)
    with pytest.raises(NotImplementedError, match=r"torch.autograd.grad or backward"):
        grad(lambda state: functional_call(model, state, x).sum())(dict(model.named_parameters()))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", [*NAMES, *training_recipes.NAMES])
def test_convolutions(name: str, groups: int) -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=groups), nn.ReLU())
    try:
        qtorch.quantize_(model, {"0": make_any(name)})
    except ValueError as error:
        pytest.skip(str(error))
    x = torch.randn(2, 64, 4, 4)
    model(x)
    model.eval()
    close(vmap(model)(x), torch.stack([model(image) for image in x]))
    close(grad(energy(model))(x), gradient(model, x))
    close(vmap(grad(energy(model)))(x), torch.stack([gradient(model, image) for image in x]))
    if name in NAMES:
        tangent, u = jvp(model, (x,), (x,))[1], torch.randn(2, 64, 4, 4)
        close((tangent * u).sum(), (vjp(model, x)[1](u)[0] * x).sum())


@every
def test_embeddings(name: str) -> None:
    model = nn.Sequential(nn.Embedding(40, 64))
    try:
        qtorch.quantize_(model, {"0": make_any(name)})
    except ValueError as error:
        pytest.skip(str(error))
    ids = torch.randint(0, 40, (3, 6))
    model(ids)
    model.eval()
    torch.testing.assert_close(vmap(model)(ids), model(ids), rtol=0, atol=0)
    torch.testing.assert_close(vmap(vmap(model), in_dims=1, out_dims=1)(ids), model(ids), rtol=0, atol=0)


@every
def test_products_other_than_linear(name: str) -> None:
    model, x = model_of(name), torch.randn(3, 5, 96)
    weight = model[2].weight
    if not isinstance(weight, qtorch.dtypes.QuantizedTensor):
        pytest.skip("a module of its own computes its product")
    for product in (
        lambda x: x @ weight.t(),
        lambda x: (weight @ x.mT).mT,
        lambda x: torch.addmm(x[:1, :64], x, weight.t()),
    ):
        close(vmap(product)(x), torch.stack([product(rows) for rows in x]))
        close(grad(energy(product))(x[0]), gradient(product, x[0]))


def test_batched_bias_and_its_training() -> None:
    layer = quantized_layer()
    x, biases = torch.randn(3, 5, 64), torch.randn(3, 64)
    got = vmap(functional.linear, in_dims=(0, None, 0))(x, layer.weight, biases)
    close(got, torch.stack([functional.linear(a, layer.weight, b) for a, b in zip(x, biases, strict=True)]))
    close(
        vmap(functional.linear, in_dims=(None, None, 0))(x[0], layer.weight, biases)[1], got[0] - biases[0] + biases[1]
    )
    from torch.autograd import forward_ad

    layer, x, v = quantized_layer(), torch.randn(5, 64), torch.randn(5, 64)
    with torch.no_grad():
        layer(x), layer(x)
    with torch.no_grad(), forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, v))).tangent
    close(tangent, jvp(layer, (x,), (v,))[1])
    layer, x = quantized_layer(), torch.randn(5, 64)

    def loss(bias: Tensor) -> Tensor:
        return functional.linear(x, layer.weight, bias).square().sum()

    bias = layer.bias.detach()
    close(grad(loss)(bias), 2 * layer(x).detach().sum(0))
    layer, x = quantized_layer(), torch.randn(5, 64)
    (wanted,) = torch.autograd.grad(energy(layer)(x), layer.bias)
    energy(vmap(layer))(x).backward()
    assert layer.weight.grad is None
    close(layer.bias.grad, wanted)


def quantized_layer() -> nn.Linear:
    layer = nn.Linear(64, 64)
    qtorch.quantize_(layer, qtorch.int8_dynamic_activation_int8_weight())
    return layer


FROZEN = ["int8_weight_only", "int8_dynamic_activation_int8_weight", "nf4_weight_only"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FROZEN, "int8_mixed_precision_training", "qat"])
def test_compiled_transforms(name: str) -> None:
    """Of models in training the compiler would also compile the gradient of what depends on parameters: a second
    derivative."""
    model, x = model_of(name), torch.randn(3, 5, 64)
    for function in (vmap(model), grad(energy(model)), vmap(grad(energy(model)))):
        torch.compiler.reset()
        with contextlib.nullcontext() if name in FROZEN else torch.no_grad():
            close(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))
    if name in FROZEN:
        return
    with pytest.raises(Exception, match=r"second derivative of a layer in training .* under torch.no_grad"):
        torch.compile(grad(energy(model)), backend="aot_eager")(x)
