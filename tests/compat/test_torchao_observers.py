"""Observers under torchao's names: insert, run on data, quantize."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtorch import MappingType, PerAxis, PerTensor, compute_error, load_quantized, quantize_, save_quantized
from qtorch.calibration import observed
from qtorch.dtypes import AffineQuantizedTensor
from qtorch.integrations import torchao as ao
from tests.refusals import refuses

pytestmark = pytest.mark.usefixtures("torch_kernels")

SYMMETRIC, ASYMMETRIC = MappingType.SYMMETRIC, MappingType.ASYMMETRIC


def observer(dtype: torch.dtype, granularity: Any, mapping: MappingType = SYMMETRIC, **more: Any) -> Any:
    options = {"eps": torch.finfo(torch.float32).eps, "scale_dtype": torch.float, "zero_point_dtype": torch.int, **more}
    return ao.AffineQuantizedMinMaxObserver(mapping, dtype, granularity=granularity, **options)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).requires_grad_(False)


def batches(count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(10, 32, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("mapping", MappingType)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_an_observer_is_the_one_of_torch(mapping: MappingType, dtype: torch.dtype) -> None:
    """torch's own observers give the extremes; the primitives make the same scale of them."""
    from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver

    for granularity, other in ((PerTensor(), MinMaxObserver()), (PerAxis(0), PerChannelMinMaxObserver(ch_axis=0))):
        ours = observer(dtype, granularity, mapping)
        refuses("it has seen nothing yet", lambda ours=ours: ours.calculate_qparams())
        for x in (torch.randn(6, 20), torch.randn(6, 20) * 3, torch.randn(6, 20)):
            assert ours(x) is x
            other(x)
        ours(torch.empty(0, 20))
        assert torch.equal(ours.min_val, other.min_val)
        assert torch.equal(ours.max_val, other.max_val)
        scale, zero_point = ours.calculate_qparams()
        assert scale.shape == zero_point.shape == other.min_val.shape
        assert zero_point.dtype is torch.int
        low, high = other.min_val.clamp(max=0), other.max_val.clamp(min=0)
        if mapping is ASYMMETRIC:
            torch.testing.assert_close(scale, (high - low) / 255)
        elif mapping is SYMMETRIC:
            torch.testing.assert_close(scale, torch.maximum(-low, high) / 127.5)
    again = ao.AffineQuantizedMinMaxObserver.with_args(mapping, dtype, PerTensor())()
    assert again.spec.mapping is mapping


@pytest.mark.parametrize("mapping", [SYMMETRIC, ASYMMETRIC])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("with_weight", [True, False])
def test_insert_run_quantize(mapping: MappingType, dtype: torch.dtype, with_weight: bool, tmp_path: Path) -> None:
    floating = dtype.is_floating_point
    if floating and mapping is ASYMMETRIC:
        pytest.skip("float8 has no zero points")
    more = {"zero_point_domain": None} if floating else {}
    floats, quantized, x = model(), model(), torch.randn(50, 32)
    weight = observer(dtype, PerAxis(0), SYMMETRIC if dtype is torch.int8 else mapping, **more)
    ao.insert_observers_(quantized, observer(dtype, PerTensor(), mapping, **more), weight if with_weight else None)
    quantized = copy.deepcopy(quantized)
    for batch in batches():
        assert torch.equal(quantized(batch), floats(batch))
    found = quantized[0].weight.input_observer
    largest = torch.cat(batches()).aminmax()
    assert (found.min_val, found.max_val) == (largest.min, largest.max)
    assert quantized[2].weight.input_observer.min_val == 0
    scales = [quantized[i].weight.input_observer.calculate_qparams() for i in (0, 2)]
    report = quantize_(quantized, ao.from_observers())
    assert len(report.quantized) == 2
    for layer, (scale, zero_point) in zip((quantized[0], quantized[2]), scales, strict=True):
        assert isinstance(layer.weight, AffineQuantizedTensor)
        assert layer.weight.act_scale.item() == scale.item()
        if layer.weight.act_zero_point is not None:
            assert layer.weight.act_zero_point.item() == zero_point.item()
        assert not layer.weight.requires_grad
    # e4m3 has 3 bits of mantissa. Larger values than in the data clip.
    assert 20 < compute_error(floats(x), quantized(x)) < (35 if floating else 50)
    save_quantized(quantized, tmp_path / "model.safetensors")
    assert torch.equal(load_quantized(model(), tmp_path / "model.safetensors")(x), quantized(x))


def test_observers_and_weights_alone() -> None:
    """In the first layer, whose input does not depend on others; codes there are [-127, 127] too."""
    ours, theirs = model(), model()
    of_input, of_weight = (observer(torch.int8, each, quant_min=-127, eps=None) for each in (PerTensor(), PerAxis(0)))
    ao.insert_observers_(theirs, of_input, of_weight)
    for batch in batches():
        theirs(batch)
    ao.quantize_(theirs, ao.from_observers())
    quantize_(ours, observed(ao.Int8StaticActivationInt8WeightConfig(), batches(), observer="min_max"))
    assert torch.equal(ours[0].weight.act_scale, theirs[0].weight.act_scale)
    assert torch.equal(ours[0].weight.dequantize(), theirs[0].weight.dequantize())
    for tensors in ("qdata", "scale"):
        assert torch.equal(getattr(ours[0].weight, tensors), getattr(theirs[0].weight, tensors))
    shared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8))
    shared[1].weight = shared[0].weight
    ao.insert_observers_(shared, None, observer(torch.int8, PerAxis(0)), filter_fn=lambda m, name: name in ("0", "1"))
    assert shared[0].weight is shared[1].weight
    assert type(shared[2].weight) is nn.Parameter
    assert shared[0].weight.requires_grad
    shared(torch.randn(3, 8)).sum().backward()
    assert shared[0].weight.grad is not None
    shared.to(torch.float64).to(torch.float32)
    report = quantize_(shared, ao.from_observers())
    assert [layer.name for layer in report.quantized] == ["0.weight"]
    assert shared[0].weight is shared[1].weight
    assert shared[0].weight.scheme.activation is None


def test_what_is_refused() -> None:
    plain = model()
    refuses("nothing to quantize", lambda: quantize_(plain, ao.from_observers()))
    refuses("has no observers; call insert_observers_", lambda: quantize_(plain, {"0": ao.from_observers()}))
    refuses("got neither", lambda: ao.insert_observers_(plain, None, None))
    of_input = observer(torch.int8, PerTensor())
    refuses("has no layer to observe", lambda: ao.insert_observers_(nn.ReLU(), of_input, None))
    ao.insert_observers_(plain, of_input, None)
    refuses(r"0\.weight is a LinearActivationWeightObservedTensor", lambda: ao.insert_observers_(plain, of_input, None))
    refuses("it has seen nothing yet", lambda: quantize_(plain, ao.from_observers()))
    rows = model()
    ao.insert_observers_(rows, observer(torch.int8, PerAxis(1)), None)
    rows(torch.randn(5, 32))
    with pytest.raises(ValueError, match=r"the observer of its input has 32 scales; a layer takes PerTensor\(\)"):
        quantize_(rows, ao.from_observers())
    changing = observer(torch.int8, PerAxis(0))
    changing(torch.randn(5, 4))
    refuses(r"blocks of shape \(6,\), before \(5,\)", lambda: changing(torch.randn(6, 4)))
