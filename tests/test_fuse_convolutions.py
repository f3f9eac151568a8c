"""fuse_convolutions: chains of convolutions that hand codes to each other give the bits of the unfused model."""

import copy
import functools
import pickle
import threading

import pytest
import torch
from torch import Tensor, nn

import qtorch
from benchmarks.conv_nets import BasicBlock, MobileNetV2, ResNet18
from qtorch import MappingType, PerAxis, fuse_convolutions, quantize_
from qtorch.calibration import observed
from qtorch.integrations.fusion import FusedModel
from qtorch.training import fold_batch_norm
from tests.kernels.cpu.builds import BUILDS, NEEDS_LIBRARY
from tests.refusals import refuses

SMALL_MOBILE = ((1, 8, 1, 1), (3, 12, 2, 2), (2, 20, 2, 1))
NETS = {
    "resnet": lambda: ResNet18(8, 10),
    "mobile": lambda: MobileNetV2(SMALL_MOBILE, 10),
    "small": lambda: nn.Sequential(BasicBlock(3, 8, 2), BasicBlock(8, 8, 1), nn.Flatten(2)),
}
X = torch.randn(2, 3, 37, 41, generator=torch.Generator().manual_seed(0))

pytestmark = NEEDS_LIBRARY


def recipe(kind: str) -> object:
    if kind == "per image":
        return qtorch.int8_dynamic_activation_int8_weight(act_granularity=PerAxis(0))
    mapping = MappingType.ASYMMETRIC if kind == "asymmetric" else MappingType.SYMMETRIC
    return observed(qtorch.int8_static_activation_int8_weight(act_mapping_type=mapping), [X])


def quantized(model: nn.Module, kind: str = "symmetric") -> nn.Module:
    model = model.eval()
    quantize_(model, recipe(kind), lambda module, name: isinstance(module, nn.Conv2d))
    return model


def check(fused: nn.Module, model: nn.Module, *inputs: Tensor) -> None:
    """The same results, in the same memory format, also of the next run."""
    with torch.no_grad():
        wanted = model(*inputs)
        first = fused(*inputs)
        again = fused(*inputs)
    assert torch.equal(first, wanted)
    assert torch.equal(again, wanted)
    assert first.stride() == wanted.stride()


@functools.cache
def network(name: str, kind: str) -> nn.Module:
    """A quantized network, which no test changes."""
    torch.manual_seed(0)
    return quantized(NETS[name](), kind)


@pytest.mark.parametrize(("name", "kind"), [("resnet", "asymmetric"), ("mobile", "symmetric"), ("mobile", "per image")])
@pytest.mark.parametrize("build", BUILDS)
def test_networks(build: str, name: str, kind: str) -> None:
    model = network(name, kind)
    count = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    with qtorch.kernels.cpu.compiled_library.use(build):
        fused = fuse_convolutions(model, X)
        assert fused.report.exact
        assert len(fused.report.fused) == count
        assert not fused.report.skipped
        with qtorch.kernels.record_kernels() as ran, torch.no_grad():
            fused(X)
        assert ran == [f"fused_conv.{build}"] * count
        for x in (X, X[:1], torch.randn(1, 3, 50, 33), X.to(memory_format=torch.channels_last)):
            check(fused, model, x)


class Mixed(nn.Module):
    """Groups, functions and methods, results that are read twice, a concatenation, a convolution in floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding="same")
        self.grouped = nn.Conv2d(12, 24, 3, groups=2)
        self.odd = nn.Conv2d(24, 12, (1, 3), groups=4, padding=(0, 1))
        self.plain = nn.Conv2d(12, 12, 1)
        self.last = nn.Conv2d(24, 5, 1, bias=False)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        y = nn.functional.relu(self.drop(self.first(x)), inplace=True)
        z = self.odd(self.grouped(y).relu_())
        z = torch.add(z, nn.functional.relu6(self.plain(y[:, :, 1:-1, 1:-1])))
        z = z + z
        return self.last(torch.cat([z, z.sigmoid()], 1)).flatten(1) * scale, z.view(z.shape[0], -1)


def mixed() -> nn.Module:
    torch.manual_seed(1)
    model = Mixed().eval()
    chosen = recipe("asymmetric")
    quantize_(model, dict.fromkeys(("first", "grouped", "odd", "last"), chosen))
    return model


def test_what_is_fused_and_errors() -> None:
    model = mixed()
    fused = fuse_convolutions(model, X)
    found = {f.name: (f.steps, f.result) for f in fused.report.fused}
    # Groups of six channels are padded one by one, and so made from floats.
    assert found == {
        "first": (("bias", "relu"), "floats"),
        "grouped": (("bias", "relu"), "floats"),
        "odd": (("bias", "add"), "floats"),
        "last": ((), "floats"),
    }
    assert fused.report.skipped == (("plain", "its weight is not quantized for inference"),)
    assert "plain: not fused: its weight is not quantized for inference" in str(fused.report)
    with torch.no_grad():
        for a, b in zip(fused(X), model(X), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(fused(X, scale=2.0), model(X, scale=2.0), strict=True):
            assert torch.equal(a, b)
    model = quantized(NETS["small"]())
    refuses(r"model\.eval", lambda: fuse_convolutions(model.train(), X))
    model.eval()
    refuses("give example inputs", lambda: fuse_convolutions(model))
    with pytest.raises(ValueError, match="nothing to fuse: 0: its weight is not quantized for inference"):
        fuse_convolutions(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), X)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) if x.sum() > 0 else x

    refuses(r"torch\.fx cannot trace this Branches", lambda: fuse_convolutions(quantized(Branches(), "per image"), X))


def test_results_copies_and_pickles() -> None:
    model = mixed()
    fused = fuse_convolutions(model, X)
    with torch.no_grad():
        first, other = fused(X)
        kept = first.clone(), other.clone()
        fused(X + 1)
    assert torch.equal(first, kept[0])
    assert torch.equal(other, kept[1])
    model = network("mobile", "symmetric")
    fused = fuse_convolutions(model, X)
    with torch.no_grad():
        y = fused(X)
        for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
            assert isinstance(other, FusedModel)
            assert other.report == fused.report
            with qtorch.kernels.record_kernels() as ran:
                assert torch.equal(other(X), y)
            assert ran[-1].startswith("fused_conv.")


def test_where_it_runs_unfused() -> None:
    model = network("small", "asymmetric")
    fused = fuse_convolutions(model, X)
    broken = X.clone()
    broken[1, 0, 20, 20] = float("nan")
    with torch.no_grad():
        y = fused(broken)
        assert torch.equal(y.isnan(), model(broken).isnan())
        assert torch.equal(y[0], model(X)[0])
        assert y[1].isnan().any()
        assert fused(X[:0]).shape[0] == 0
    x = X.clone().requires_grad_()
    fused(x).sum().backward()
    z = X.clone().requires_grad_()
    model(z).sum().backward()
    assert torch.equal(x.grad, z.grad)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(X), model(X))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(X), model(X))


def test_weights_that_change_and_batch_norm() -> None:
    model = quantized(NETS["small"]())
    fused = fuse_convolutions(model, X)
    before = fused(X).detach()
    with torch.no_grad():
        model[0].conv1.weight.qdata.neg_()
        model[1].conv1.bias.add_(1)
        model[1].conv2.weight.act_scale.mul_(1.5)
    check(fused, model, X)
    assert not torch.equal(before, fused(X).detach())
    model[0].conv1.weight = nn.Parameter(copy.deepcopy(model[0].conv1.weight), False)
    check(fused, model, X)
    float_model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))
    float_model(X)
    float_model.eval()
    with torch.no_grad():
        wanted = float_model(X)
    fold_batch_norm(float_model)
    with torch.no_grad():
        torch.testing.assert_close(float_model(X), wanted, rtol=1e-4, atol=1e-4)
    model = quantized(float_model)
    fused = fuse_convolutions(model, X)
    assert [f.steps for f in fused.report.fused] == [("bias", "relu"), ("bias",)]
    check(fused, model, X)
    assert 20 < qtorch.compute_error(wanted, fused(X)) < 60


def test_threads_have_memory_of_their_own() -> None:
    model = network("mobile", "symmetric")
    fused = fuse_convolutions(model, X)
    inputs = [X + i for i in range(4)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                if not torch.equal(fused(inputs[i]), wanted[i]):
                    wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
