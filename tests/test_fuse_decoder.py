"""fuse_decoder: norms and rotary embeddings in one call each, within bounds of fp32 and with torch's bits."""

import copy
import sys

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch.integrations.fusion.decoder_layers import ROTATION
from qtorch.kernels.cpu import compiled_library
from qtorch.kernels.cpu.decoder import rms_norm, rotate_halves
from tests.kernels.cpu.builds import BUILDS, NEEDS_LIBRARY
from tests.movement.holding import through_file
from tests.refusals import refuses
from tests.zoo.architectures import ARCHITECTURES, built, output_of

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
UNIT = 2.0**-24
EPS = 1e-5


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


NOTHING = {"gpt2", "convnext"}  # is there to fuse in these
NORMS = [(1, 1, 0, True), (3, 100, 1, False), (2, 576, 0, False), (40, 2048, 1, False), (1, 5632, 0, True)]


@NEEDS_LIBRARY
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "k", "offset", "rounds"), NORMS)
def test_norm(build: str, dtype: torch.dtype, rows: int, k: int, offset: int, rounds: bool) -> None:
    torch.manual_seed(0)
    x, weight, about = torch.randn(rows, 2 * k).to(dtype)[:, :k], torch.randn(k).to(dtype), torch.finfo(dtype)
    with compiled_library.use(build), qtorch.kernels.record_kernels() as ran:
        got = rms_norm(x, weight, EPS, offset, rounds)
    assert ran == [f"rms_norm.{build}"]
    assert got is not None
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * (weight.double() + offset)
    # Sums in 64 lanes and the steps after them; then one rounding to 16 bits, or two.
    bound = (k / 128 + 8) * UNIT + (0 if dtype is torch.float32 else (1 + rounds) * about.eps / 2 * 1.01)
    error = (got.double() - exact).abs()
    assert (error <= bound * exact.abs() + about.smallest_normal * about.eps).all()
    assert k == 1 or (error > about.eps / 16 * exact.abs()).any()
    # The same bits in whatever order of memory, among other rows, and on any processor.
    assert torch.equal(got, rms_norm(x.contiguous(), weight, EPS, offset, rounds))
    assert torch.equal(got[-1:], rms_norm(x[-1:], weight, EPS, offset, rounds))


@NEEDS_LIBRARY
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rotary_embedding(build: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for batch, heads, few, rows, width in ((1, 32, 4, 1, 64), (2, 9, 3, 7, 80), (3, 1, 1, 5, 2), (2, 4, 4, 300, 128)):
        query = torch.randn(batch, rows, heads, width).to(dtype).transpose(1, 2)
        key = torch.randn(batch, few, rows, 2 * width).to(dtype)[..., width:]
        for count in (1, batch):
            cos, sin = torch.randn(2, count, rows, width).to(dtype)
            with compiled_library.use(build), qtorch.kernels.record_kernels() as ran:
                got = rotate_halves(query, key, cos, sin)
            assert ran == [f"rotate_halves.{build}"]
            assert got is not None
            assert all(map(torch.equal, got, (rotated(query, cos, sin), rotated(key, cos, sin))))


@NEEDS_LIBRARY
def test_what_they_do_not_take() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    for of_x, of_weight in (
        (x.double(), weight.double()), (x, weight.half()), (x[:, ::2], weight[:4]), (x[:0], weight), (x, weight[:1]),
    ):  # fmt: skip
        assert rms_norm(of_x, of_weight, EPS, 0.0, True) is None
    assert rms_norm(torch.complex(x, x).conj().imag, weight, EPS, 0.0, True) is None
    q, k, a = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 3, 8)
    for given in (
        (q[0], k, a, a), (q, k[:1], a, a), (q, k, a[:, :1], a), (q, k.half(), a, a), (q[..., :4], k[..., :4], a, a),
        (q, k, a[0], a), (q[..., 1:], k[..., 1:], a[..., 1:], a[..., 1:]),
    ):  # fmt: skip
        assert rotate_halves(*given) is None


@NEEDS_LIBRARY
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = built(name)
    norms = sum(type(module).__name__.endswith("RMSNorm") for module in model.modules())
    for file in {type(module).__module__ for module in model.modules()}:
        if hasattr(sys.modules[file], ROTATION):  # to be put back
            monkeypatch.setattr(sys.modules[file], ROTATION, getattr(sys.modules[file], ROTATION))
    wanted, fused = output_of(model, batch), copy.deepcopy(model)
    if name in NOTHING:
        refuses(f"fuse_decoder: {type(model).__name__} has no projections", lambda: qtorch.fuse_decoder(fused))
        return
    report = qtorch.fuse_decoder(fused)
    assert sum("norm" in path for path in (*report.fused, *dict(report.skipped))) >= norms
    assert fused.state_dict().keys() == model.state_dict().keys()
    with qtorch.kernels.record_kernels() as ran:
        torch.testing.assert_close(output_of(fused, batch), wanted, rtol=1e-4, atol=1e-5)
    assert any("rms_norm" in kernel for kernel in ran) == any("norm" in path for path in report.fused)
    if name == "llama":
        assert str(report).endswith("6 of 6 norms and rotary embeddings are one kernel")
        assert sum("rotate_halves" in kernel for kernel in ran) == 2
        assert len(qtorch.fuse_decoder(model).fused) == 6  # the function of the file has been replaced before
        compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(output_of(compiled, batch), wanted, rtol=1e-5, atol=1e-6)


class Gated(nn.Module):
    """What looks like a norm and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * self.weight


class WithGate(nn.RMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x)


@NEEDS_LIBRARY
def test_norms_of_a_module() -> None:
    shared = nn.RMSNorm(8, eps=EPS)
    model = nn.ModuleDict(
        {"a": shared, "b": shared, "hook": nn.RMSNorm(8, eps=EPS), "wide": nn.RMSNorm(8, eps=EPS).double()}
        | {"gated": Gated(), "with_gate": WithGate(8, eps=EPS), "plain": nn.LayerNorm(8)}
    )
    model["hook"].register_forward_hook(lambda *_: None)
    state = copy.deepcopy(model.state_dict())
    report = qtorch.fuse_decoder(model)
    assert report.fused == ("a", "b")
    assert model["a"] is model["b"]
    words = {"hook": "hooks", "wide": "float64", "gated": "Gated computes", "with_gate": "other arguments"}
    assert {name: words[name] in reason for name, reason in report.skipped} == dict.fromkeys(words, True)
    assert all(f"{name}: not fused" in str(report) for name in words)
    assert qtorch.fuse_decoder(model).fused == ()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    fused, x = model["a"], torch.randn(4, 8)
    with torch.no_grad():
        for moved in (copy.deepcopy(fused), through_file(fused, weights_only=False)):
            assert torch.equal(moved(x), fused(x))
        compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), shared(x))
        assert torch.equal(torch.func.vmap(fused)(x), shared(x))
        with torch.autocast("cpu"):
            assert torch.equal(fused(x), shared(x))
        assert copy.deepcopy(fused).to("meta")(x.to("meta")).is_meta
    x.requires_grad_()
    fused(x).sum().backward()
    grad, x.grad = x.grad, None
    shared(x).sum().backward()
    assert torch.equal(grad, x.grad)
    for made in (nn.Linear(2, 2), nn.Sequential(nn.RMSNorm(8, elementwise_affine=False))):
        refuses(f"fuse_decoder: {type(made).__name__} has no projections", lambda made=made: qtorch.fuse_decoder(made))
    refuses("got None", lambda: qtorch.fuse_decoder(None), TypeError)
