"""What a layer is called with."""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from qtorch import quantize_
from qtorch.model.install import PreparedModule
from tests.attack.operations import inputs, operation, outputs, same
from tests.attack.subject import Experts, K, N, Subject
from tests.movement.reasons import CLEAR

GROUP = "Inputs"

SHARED_SCALES = ("int8_tilewise_training",)
"""Recipes with scales that rows share."""


@operation(GROUP, "NaN or Inf in a row")
def not_finite_rows(subject: Subject) -> None:
    """It is seen in that row's outputs, and in no other row: the others are as if the row were zero."""
    for value in (float("nan"), float("inf"), -float("inf")):
        layer, x = subject.layer().eval(), inputs()[2]
        with torch.no_grad():
            x[3] = 0
            clean = layer(x)
            x[3, 5] = value
            y = layer(x)
        assert not bool(y[3].isfinite().any()), f"{value} in a row gives {float(y[3].nan_to_num().abs().max()):.3g}"
        others = [row for row in range(len(x)) if row != 3]
        assert bool(y[others].isfinite().all()), f"{value} in a row reaches other rows"
        same([y[others]], [clean[others]], f"{value} in a row: other rows")


@operation(GROUP, "a row near the largest number")
def largest_row(subject: Subject) -> None:
    """What is finite in floating point is finite, of the accuracy of the recipe, and no other row changes."""
    layer, x = subject.layer().eval(), inputs()[2]
    others = [row for row in range(len(x)) if row != 3]
    with torch.no_grad():
        x[3] = 0
        clean = layer(x)
        for size, columns in itertools.product((1e36, 1e38), (slice(None), slice(5, 6))):
            x[3] = inputs()[2][3].clamp(-2, 2)
            x[3, columns] *= size
            y, wanted = layer(x), nn.functional.linear(x, subject.values(), subject.float_layer().bias)
            assert bool(y.isfinite().all()), f"{int((~y.isfinite()).sum())} outputs of a row of {size:g} are not finite"
            if "nvfp4" not in subject.name and subject.name not in SHARED_SCALES:  # a scale of the whole input
                same([y[others]], [clean[others]], f"beside a row of {size:g}", 0.0)
            if not subject.clips:
                same([y[3] / size], [wanted[3] / size], f"a row of {size:g}", 0.75)


@operation(GROUP, "weights near the largest number")
def largest_weights(subject: Subject) -> None:
    """What is finite with the numbers that the codes stand for is finite."""
    if subject.trains:
        return
    for size in (1e30, 1e37):
        layer = subject.float_layer()
        with torch.no_grad():
            layer.weight[7] *= size
            layer.weight[9, 20] = size
            layer = subject.quantize(layer).eval()
            for x in inputs():
                x = x / 64
                y, wanted = layer(x), nn.functional.linear(x, layer.weight.dequantize(), layer.bias)
                assert bool(y.isfinite().all()), f"{int((~y.isfinite()).sum())} outputs of {size:g} are not finite"
                for row in () if subject.clips else (7, 9):
                    same([y[:, row] / size], [wanted[:, row] / size], f"a row of {size:g}", 0.5)


@operation(GROUP, "another number of threads")
def threads(subject: Subject) -> None:
    """The same bits where integers are added up, and otherwise the same up to the order of sums."""
    layer, before = subject.layer().eval(), torch.get_num_threads()
    spec = getattr(layer.weight, "scheme", None)
    activation = None if isinstance(layer, PreparedModule) else getattr(spec, "activation", None)
    exact = activation is not None and not activation.dtype.is_floating_point
    wanted = outputs(layer)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            same(outputs(layer), wanted, f"{count} threads", 0.0 if exact else 1e-6)
    finally:
        torch.set_num_threads(before)


@operation(GROUP, "no rows")
def no_rows(subject: Subject) -> None:
    layer = subject.layer().eval()
    for shape in ((0, K), (2, 0, K)):
        y = layer(torch.zeros(shape))
        assert y.shape == (*shape[:-1], N)
    layer.train()
    for shape in ((0, K), (2, 0, K)):
        x = torch.zeros(shape, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
        assert x.grad.shape == shape
    assert layer.weight.grad is None or not layer.weight.grad.any()


@operation(GROUP, "one vector, batches of any rank")
def any_rank(subject: Subject) -> None:
    layer = subject.layer().eval()
    x = inputs()[2]
    with torch.no_grad():
        y = layer(x)
        if subject.name != "int8_tilewise_training":  # whose scales are those of tiles of rows
            same([layer(x[0])], [y[0]], "a vector", 0.05 if "nvfp4" in subject.name else 2e-5)
        same([layer(x.reshape(2, 8, 4, K)).reshape(64, N)], [y], "a batch of rank 4")


@operation(GROUP, "rows apart in memory")
def strided_rows(subject: Subject) -> None:
    layer, x = subject.layer().eval(), inputs()[2]
    wide, tall = torch.zeros(64, 2 * K), torch.zeros(K, 64)
    wide[:, :K], tall[:] = x, x.t()
    with torch.no_grad():
        same([layer(wide[:, :K]), layer(tall.t())], [layer(x)] * 2, "strided")
        same([layer(x[:1].expand(64, K))], [layer(x[:1].repeat(64, 1))], "expanded")


@operation(GROUP, "rows with the negative bit")
def negative_view(subject: Subject) -> None:
    """A tensor that stands for the negative of its memory, as input, bias and gradient; on first and later calls."""
    layer, x = subject.layer(), inputs()[2]
    results = []
    for of in (torch.neg, torch._neg_view):
        layer.eval()
        with torch.no_grad():
            y = [layer(of(x)), layer(of(x)), nn.functional.linear(x, layer.weight, of(torch.linspace(-1, 1, N)))]
        layer.train()
        torch.manual_seed(1)
        at = of(x).detach().requires_grad_()
        layer(at).backward(of(torch.ones(64, N).cumsum(1)))
        gradients = [at.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
        results.append((y, [g.dequantize() if hasattr(g, "dequantize") else g for g in gradients]))
        layer.zero_grad()
    (y, gradients), (same_y, same_gradients) = results
    same(same_y, y, "the negative view", 0.0)
    same(same_gradients, gradients, "gradients of the negative view", 0.0)


def _refused(subject: Subject, wrong: list[Tensor]) -> None:
    """Each of these inputs is an error, on the first and on later calls; the last error is raised."""
    layer = subject.layer().eval()
    for _ in range(2):
        for x in wrong:
            try:
                y = layer(x)
            except CLEAR as error:
                last = error
            else:
                what = f"{x.dtype} of shape {tuple(x.shape)} on {x.device}"
                raise AssertionError(f"{what} is accepted, and gives {y.dtype} of shape {tuple(y.shape)}")
        outputs(layer)
    raise last


@operation(GROUP, "a scalar, another width", refuses=r"shape|dimension|width|columns")
def wrong_shapes(subject: Subject) -> None:
    shapes = ((), (K - 1,), (3, K + 1), (3, 2 * K), (1, 2**20), (2, 3, K // 2))
    _refused(subject, [torch.zeros(()).expand(shape) for shape in shapes])


@operation(GROUP, "bf16 rows for an fp32 model", refuses=r"dtype|bfloat16|BFloat16")
def another_dtype(subject: Subject) -> None:
    _refused(subject, [inputs(torch.bfloat16)[1]])


@operation(GROUP, "float64 and integer rows", refuses=r"float64|double|Double|dtype|floating")
def strange_dtypes(subject: Subject) -> None:
    _refused(subject, [torch.ones(3, K, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.float64)])


@operation(GROUP, "rows on another device", refuses=r"device|meta")
def another_device(subject: Subject) -> None:
    _refused(subject, [torch.zeros(3, K, device="meta")])


@operation(GROUP, "rows on the CPU for a layer, or a part of it, on meta", refuses=r"device|meta", may_kill=True)
def layer_on_another_device(subject: Subject) -> None:
    """All of it, its bias, or what it holds beside the weight; never called, and called before."""
    wanted, words = outputs(subject.layer())[1], []
    for part in ("", "bias", *(name for name, _ in subject.layer().named_children())):
        for calls in (0, 2):
            layer = subject.layer().eval()
            for _ in range(calls):
                layer(inputs()[1])
            if part == "bias":
                layer.bias = nn.Parameter(layer.bias.detach().to("meta"))
            else:
                layer.get_submodule(part).to("meta")
            try:
                y = layer(inputs()[1])
            except (ValueError, RuntimeError, NotImplementedError) as error:
                words.append(error)
            else:
                assert part not in ("", "bias"), f"with {part or 'all'} on meta it gives {y}"
                same([y], [wanted], f"with {part} on meta", 0)
    raise words[0]


@operation(GROUP, "`torch.autocast`")
def autocast(subject: Subject) -> None:
    layer = subject.layer().eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(inputs()[1])
    assert y.dtype == torch.bfloat16
    with torch.no_grad():
        same([y.float()], [layer(inputs()[1])], "under autocast", 0.05 if "4" not in subject.name else 0.3)


@operation(GROUP, "`torch.inference_mode`")
def inference_mode(subject: Subject) -> None:
    layer = subject.layer().eval()
    wanted = outputs(layer)
    with torch.inference_mode():
        same([layer(x) for x in inputs()], wanted, "under inference mode")
    same(outputs(layer), wanted, "after inference mode")


@operation(GROUP, "the gradient of the input")
def gradient_of_the_input(subject: Subject) -> None:
    layer, x = subject.layer(), inputs()[2].requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    assert float(x.grad.norm()) > 0
    assert (layer.weight.grad is not None) == layer.weight.requires_grad


@operation(GROUP, "a bf16 model")
def a_model_in_bf16(subject: Subject) -> None:
    layer = subject.quantize(subject.float_layer().to(torch.bfloat16))
    with torch.no_grad():
        y = layer.eval()(inputs(torch.bfloat16)[2])
    assert y.dtype == torch.bfloat16
    wanted = nn.functional.linear(inputs()[2], subject.values(), subject.float_layer().bias)
    error = float((y.float() - wanted).norm() / wanted.norm())
    assert error < 0.75, f"relative error {error:.2g}"


@operation(GROUP, "in-place operations on the output")
def in_place_on_the_output(subject: Subject) -> None:
    """As on that of a float layer, with its gradients, in each mode; and the layer is what it was."""
    for what, layer, x in products(subject):
        for mode, (context, of_input) in MODES.items():
            for _ in range(2):  # of the second call kernels remember the first
                got, wanted = (_changed(layer, x, context, of_input, in_place) for in_place in (True, False))
                same(got, wanted, f"{what}, {mode}")


def products(subject: Subject) -> Iterator[tuple[str, Callable[[Tensor], Tensor], Tensor]]:
    """Every kind of product that the recipe takes: (its name, what computes it, an input)."""
    layer, x = subject.layer(), inputs()[2]
    for shape in ((K,), (64, K), (2, 5, K), (1, 1, K), (2, 2, 4, 2, K)):
        yield f"linear of {shape}", layer, x.flatten()[: torch.Size(shape).numel()].view(shape)
    if isinstance(layer, PreparedModule):
        return
    yield "matmul", lambda x: x @ layer.weight.t(), x[:6].view(2, 3, K)
    yield "addmm", lambda x: torch.addmm(layer.bias, x, layer.weight.t()), x[:6]
    images, ids = x[:16].reshape(1, K, 4, 4), torch.arange(6).view(2, 3)
    modules: list[tuple[nn.Module, Tensor]] = [
        (nn.Conv2d(K, N, 3, padding=1), images), (nn.Conv2d(K, N, 1), images), (nn.Conv2d(K, N, 3, groups=2), images),
        (nn.Conv1d(K, N, 3), images[0].flatten(1)), (nn.ConvTranspose2d(K, N, 2), images), (nn.Embedding(N, K), ids),
        (nn.EmbeddingBag(N, K, mode="sum"), ids), (Experts(2, N), x[:6].view(2, 3, K)),
    ]  # fmt: skip
    for module, x in modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                quantize_(module, subject.recipe, targets="all")
            except ValueError:  # the recipe does not take it
                continue
        yield str(module), module, x


MODES: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[object]], bool]] = {
    "grad": (contextlib.nullcontext, True),
    "no gradient of the input": (contextlib.nullcontext, False),
    "no_grad": (torch.no_grad, False),
    "inference_mode": (torch.inference_mode, False),
    "autocast": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), True),
}
"""Contexts, and whether the input requires a gradient."""


def _changed(
    layer: Callable[[Tensor], Tensor], x: Tensor, context: Callable[[], contextlib.AbstractContextManager[object]],
    of_input: bool, in_place: bool,
) -> list[Tensor]:  # fmt: skip
    """relu(2 layer(x) + more), with 0 in the first column, and its gradients. What follows `no_grad` is outside of it,
    as where an adapter adds to the output of a base without a gradient."""
    torch.manual_seed(0)
    parameters = [p for p in layer.parameters() if p.requires_grad] if isinstance(layer, nn.Module) else []
    x = x.clone().requires_grad_(of_input and x.is_floating_point())
    after = torch.inference_mode if context is torch.inference_mode else contextlib.nullcontext
    with context():
        y = layer(x)
    with after():
        more = torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype).requires_grad_()
        if in_place:
            y *= 2
            y += more
            y[..., 0] = 0
            y.relu_()
        else:
            y = y * 2 + more
            y = torch.cat([torch.zeros_like(y[..., :1]), y[..., 1:]], -1).relu()
    of = [t for t in (x, more, *parameters) if t.requires_grad]
    if not y.requires_grad:
        return [y]
    return [y.detach(), *(g for g in torch.autograd.grad(y.square().sum(), of, allow_unused=True) if g is not None)]
