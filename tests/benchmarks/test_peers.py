"""benchmarks/peers.py: each engine that can be imported multiplies with the same weight, at the precision it says."""

import itertools
import warnings

import pytest
import torch

from benchmarks import peers
from benchmarks.peers import FLOATING, PEERS, ROW, Peer, Precision
from qtorch.kernels.features import cpu_has

CASES = [(peer, dtype) for peer in PEERS.values() for dtype in peer.dtypes]

# Rounding errors of random weights and inputs, relative: at least half and at most twice of what is expected.
WEIGHT_ERROR = {(8, ROW): 0.008, (4, 32): 0.087, (4, 128): 0.11}
INPUT_ERROR = {8: 0.008, FLOATING: 0.0}
DTYPE_ERROR = {torch.float32: 0.0, torch.bfloat16: 0.004}


@pytest.mark.parametrize(("peer", "dtype"), CASES, ids=lambda value: getattr(value, "name", str(value)))
def test_near_the_float_product(peer: Peer, dtype: torch.dtype) -> None:
    if not peer.importable:
        pytest.skip(f"{peer.package} is not installed")
    torch.manual_seed(0)
    weight = torch.randn(192, 256).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, second = peer.build(weight, 2)
    precision = peer.precision
    parts = (
        WEIGHT_ERROR[precision.weight, precision.group],
        INPUT_ERROR[precision.activation],
        DTYPE_ERROR[dtype],
    )
    expected = sum(part**2 for part in parts) ** 0.5
    # Without VNNI onnxruntime adds up pairs of int8 products in int16, with saturation.
    most = 2 if "int8, A8" not in peer.name or cpu_has("vnni") else 10
    for layer, rows in itertools.product((first, second), (1, 5, 33)):
        x = torch.randn(rows, 256).to(dtype)
        wanted = x.float() @ weight.float().t()
        call = layer(x)
        y = call()
        assert y.dtype is dtype
        assert expected / 2 < relative_error(y, wanted) < most * expected
        x.mul_(2)  # inputs are read on each call
        assert expected / 2 < relative_error(call(), 2 * wanted) < most * expected


def relative_error(y: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((y.float() - wanted).norm() / wanted.norm())


def test_which_peers_a_layer_is_compared_with() -> None:
    ours = Precision(4, 32, FLOATING)
    names = {name for name, peer in PEERS.items() if ours.covers(peer.precision)}
    assert {"onnxruntime int4 g32", "onnxruntime int4 g32, A8", "onnxruntime int4 g128", "torchao int4 g128"} <= names
    assert not any("int8" in name for name in names)
    assert not Precision(4, 128, FLOATING).covers(Precision(4, 32, FLOATING))
    assert not Precision(8, ROW, 8).covers(Precision(8, ROW, FLOATING))


def test_what_cannot_be_imported_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.found(torch.float32) == []
