"""Batch normalization folded into convolutions: the same function, and in training the one that is served."""

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from qtorch import compute_error, int8_static_activation_int8_weight, quantize_
from qtorch.dtypes import ConvWeight
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import compiled_library
from qtorch.training import convert, fold_batch_norm, lsq, scheduled_qat

CONVS = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


def model_and_input(ndim: int = 2, bias: bool = True) -> tuple[nn.Sequential, Tensor]:
    """With statistics of data, gammas of either sign and one of zero."""
    conv, norm = CONVS[ndim]
    model = nn.Sequential(conv(4, 8, 3, bias=bias), norm(8), nn.ReLU(), conv(8, 6, 2), norm(6, affine=False))
    x = torch.randn(5, 4, *(7, 6, 5)[:ndim]) * 3 + 1
    nn.init.uniform_(model[1].weight, -2, 2)
    nn.init.normal_(model[1].bias)
    with torch.no_grad():
        model[1].weight[3] = 0
        for _ in range(30):
            model(x)
    return model, x


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ndim", CONVS)
def test_folded_for_serving(ndim: int, bias: bool) -> None:
    model, x = model_and_input(ndim, bias)
    wanted = model.eval()(x)
    assert fold_batch_norm(model) == [("0", "1"), ("3", "4")]
    assert [type(module) for module in model[1::3]] == [nn.Identity, nn.Identity]
    assert compute_error(wanted, model(x)) > 100


def test_by_name() -> None:
    model = nn.Sequential(Branch(), nn.ReLU()).eval()
    assert fold_batch_norm(model) == []
    x = torch.randn(2, 8, 5, 5)
    wanted = model(x)
    fold_batch_norm(model, {"0.conv": "0.norm"})
    assert type(model[0].norm) is nn.Identity
    assert compute_error(wanted, model(x)) > 100


def test_kept_for_training_it_computes_the_same() -> None:
    model, x = model_and_input()
    kept = copy.deepcopy(model)
    fold_batch_norm(kept, train=True)
    for mode in (True, False):
        a, b = model.train(mode)(x), kept.train(mode)(x)
        assert torch.equal(a, b)
    names = {name for name, _ in kept.named_parameters()}
    assert names == {"0.weight", "0.bias", "0.norm.weight", "0.norm.bias", "3.weight", "3.bias"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ndim", CONVS)
@pytest.mark.parametrize("name", ["lsq", "scheduled"])
def test_trained_and_converted_bit_for_bit(name: str, ndim: int, bias: bool) -> None:
    model, x = model_and_input(ndim, bias)
    wanted = copy.deepcopy(model).eval()(x)
    fold_batch_norm(model, train=True)
    static = int8_static_activation_int8_weight(0.05)
    recipe = lsq(8, 8) if name == "lsq" else scheduled_qat(static, observer="min_max")
    quantize_(model, {"0|3": recipe})
    before = model[0].norm.running_mean.clone()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    assert not torch.equal(model[0].norm.running_mean, before)
    assert all(bool(p.grad.any()) for p in model[0].norm.parameters())
    y = model.eval()(x).detach()
    assert 20 < compute_error(wanted, y) < 60
    quantize_(model, convert())
    assert type(model[0]) is CONVS[ndim][0]
    assert set(model.state_dict()) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert type(model[0].weight) is ConvWeight
    with record_kernels() as ran:
        assert torch.equal(model(x), y)
    if ndim < 3 and compiled_library.library() is not None:
        assert ran[0] == "conv:cpu_conv"
    else:
        assert ran[0].startswith("linear:")
        assert "int8" in ran[0]


def test_in_training_the_batch_normalizes() -> None:
    """At 8 bits the fake-quantized pair is close to the float pair, whose statistics are those of the batch."""
    model, x = model_and_input()
    quantized = copy.deepcopy(model)
    fold_batch_norm(quantized, train=True)
    quantize_(quantized, {"0|3": lsq(8, 8)})
    model.train(), quantized.train()
    assert 25 < compute_error(model(2 * x), quantized(2 * x)) < 60


def test_errors_leave_the_model_alone() -> None:
    texts = []
    for pairs in ({"0": "2"}, {"2": "1"}, {"0": "4"}, {"0": "1", "3": "1"}, {"nothing": "1"}):
        model, _ = model_and_input()
        with pytest.raises(ValueError, match=r"^fold_batch_norm: ") as error:
            fold_batch_norm(model, pairs)
        texts.append(str(error.value))
        assert type(model[1]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match="has no running statistics"):
        fold_batch_norm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)))
    assert_expected_inline(
        "\n".join(texts),
        """\
fold_batch_norm: 2 is not an nn.BatchNorm1d, 2d or 3d but a ReLU
fold_batch_norm: 2 is not an nn.Conv1d, 2d or 3d but a ReLU
fold_batch_norm: 0 has 8 channels, 4 has 6
fold_batch_norm: 3 has 6 channels, 1 has 8
fold_batch_norm: nothing is not an nn.Conv1d, 2d or 3d but a NoneType""",
    )
