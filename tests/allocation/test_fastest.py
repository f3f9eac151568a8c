"""fastest, and torchao's autoquant: each layer gets the candidate that takes least time among those that are good."""

import pytest
import torch
from torch import Tensor, nn

import qtorch
from qtorch import compute_error, int4_weight_only, int8_weight_only, quantize_
from qtorch.calibration.allocation import fastest, items
from qtorch.dtypes import AffineQuantizedTensor
from qtorch.integrations import torchao

INT4, INT8 = int4_weight_only(32), int8_weight_only()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for _ in range(3):
            x = self.b(x.relu())
        return x


def used(module: nn.Module, name: str) -> bool:
    return name != "unused"


@pytest.fixture
def known_times(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """int4 takes least for `b`, int8 for `a`, whatever the machine; what was measured."""
    measured: list[tuple[int, ...]] = []

    def product(x: Tensor, weight: Tensor) -> int:
        measured.append((*x.shape, len(weight)))
        kind = weight.scheme.weight.dtype.name if isinstance(weight, AffineQuantizedTensor) else None
        order = ["int8", "uint4", None] if weight.shape[1] == 32 else ["uint4", "int8", None]
        return 100 * (1 + order.index(kind)) * len(x)

    monkeypatch.setattr(items, "product", product)
    monkeypatch.setattr(items, "interleaved_medians", list)
    return measured


def test_each_layer_gets_the_fastest(known_times: list[tuple[int, ...]]) -> None:
    model, x = Model(), torch.randn(5, 7, 32)
    found = fastest(model, [None, INT4, INT8], x, filter_fn=used)
    assert dict(found) == {"a": INT8, "b": INT4}
    assert [row.nanoseconds for row in found.rows] == [(10500, 7000, 3500), (31500, 10500, 21000)]
    assert [row.tokens for row in found.rows] == [35, 105]
    # One measurement for each shape.
    assert known_times == [(35, 32, 64)] * 3 + [(35, 64, 64)] * 3
    before = model(x)
    assert quantize_(model, found).bytes_after == found.nbytes
    assert 10 < compute_error(before, model(x)) < 60


def test_a_least_sqnr(known_times: list[tuple[int, ...]]) -> None:
    model, x = Model(), torch.randn(5, 7, 32)
    found = fastest(model, [None, INT4, INT8], x, filter_fn=used, min_sqnr=35)
    assert dict(found) == {"a": INT8, "b": INT8}
    score = found.rows[0].scores[found.rows[0].candidates.index(str(INT8))]
    wanted, got = (nn.functional.linear(x, w).detach() for w in (model.a.weight, INT8.apply(model.a.weight.detach())))
    assert 0 < score == pytest.approx(float((got - wanted).square().sum() / wanted.square().sum()), rel=1e-2)
    assert dict(fastest(model, [None, INT4], x, filter_fn=used, min_sqnr=80)) == {"a": None, "b": None}
    with pytest.raises(ValueError, match=r"a: no candidate has an SQNR of min_sqnr=80 dB, the best has [\d.]+;"):
        fastest(model, [INT4, INT8], x, filter_fn=used, min_sqnr=80)


def test_errors() -> None:
    with pytest.raises(ValueError, match="the example does not use unused"):
        fastest(Model(), [INT8], torch.randn(2, 32))
    with pytest.raises(ValueError, match="takes linear layers, got 0"):
        fastest(nn.Sequential(nn.Conv1d(8, 8, 3)), {"0": [INT8]}, torch.randn(1, 8, 9))
    for arguments, match in [
        ({}, "example_input=None has no equivalent"),
        ({"example_input": torch.randn(2, 32), "manual": True}, "manual=True"),
        ({"example_input": torch.randn(2, 32), "mode": ["relu", None]}, "mode="),
        ({"example_input": torch.randn(2, 32), "qtensor_class_list": [int]}, "qtensor_class_list="),
    ]:
        with pytest.raises(ValueError, match=match):
            torchao.autoquant(Model(), **arguments)  # type: ignore[arg-type]


def test_autoquant_measures_for_real() -> None:
    model, x = Model(), torch.randn(5, 7, 32)
    before = model(x)
    only_int8 = [qtorch.int8_weight_only(), qtorch.int8_dynamic_activation_int8_weight()]
    assert torchao.autoquant(model, x, only_int8, used) is model
    assert isinstance(model.a.weight, AffineQuantizedTensor)
    assert isinstance(model.b.weight, AffineQuantizedTensor)
    assert not isinstance(model.unused.weight, AffineQuantizedTensor)
    assert 20 < compute_error(before, model(x)) < 80
    # With floating point among the candidates it may stay as it is, but not break.
    other = torchao.autoquant(nn.Sequential(nn.Linear(32, 32)), (x,), torchao.DEFAULT_INT4_AUTOQUANT_CLASS_LIST)
    assert other(x).isfinite().all()
    assert None in torchao.ALL_AUTOQUANT_CLASS_LIST
    assert len(torchao.ALL_AUTOQUANT_CLASS_LIST) == 7
