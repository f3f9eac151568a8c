"""int4_weight_only in its layouts, uintx_weight_only(...) and intx_weight_only(...)."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import qtorch
from qtorch import (
    MappingType,
    PackedLayout,
    PlainLayout,
    TensorCoreTiledLayout,
    ZeroPointDomain,
    compute_error,
    int4_weight_only,
    int8_weight_only,
    intx_weight_only,
    load_quantized,
    quantize_,
    save_quantized,
    uintx_weight_only,
)
from qtorch.kernels import record_kernels
from qtorch.primitives import HQQRule, MSERule, from_json, to_json

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")

FLOAT = ZeroPointDomain.FLOAT
# SQNR of a Gaussian weight in groups of 64: about 6 dB a bit.
UINTX = {1: (0.1, 2), 2: (5.5, 8.5), 3: (13, 16), 4: (19.5, 22.5), 5: (26, 29), 6: (32, 35), 7: (38, 41)}
INTX = {2: (4, 9), 3: (12, 17), 4: (19, 24), 5: (26, 30), 6: (32, 37), 7: (37, 40)}
CASES = [(uintx_weight_only(f"uint{bits}"), bits, bounds) for bits, bounds in UINTX.items()]
CASES += [(intx_weight_only(getattr(torch, f"int{bits}")), bits, bounds) for bits, bounds in INTX.items()]
# HQQ, groups of 32: SQNR, in dB.
HQQ = [
    (int4_weight_only(32, use_hqq=True), 4, (21.8, 22.8)),
    (int4_weight_only(32, FLOAT, use_hqq=True), 4, (22.3, 23.3)),
    (uintx_weight_only("uint2", 32, use_hqq=True), 2, (9, 10.2)),
    (uintx_weight_only("uint2", 32, zero_point_domain=FLOAT, use_hqq=True), 2, (9.8, 11)),
    (uintx_weight_only("uint3", 32, zero_point_domain=FLOAT, use_hqq=True), 3, (15.8, 17)),
    (intx_weight_only("int3", 32, use_hqq=True), 3, (14.4, 15.6)),
    (intx_weight_only("int2", 32, MappingType.ASYMMETRIC, use_hqq=True), 2, (9, 10.2)),
]
CASES += HQQ
every_case = pytest.mark.parametrize(("recipe", "bits", "bounds"), CASES, ids=[str(case[0]) for case in CASES])


@every_case
def test_numbers_size_and_kernel(recipe, bits, bounds) -> None:
    weight = torch.randn(96, 256)
    w = recipe.apply(weight)
    assert bounds[0] < compute_error(weight, w.dequantize()) < bounds[1]
    assert w.qdata.nbytes * 8 == bits * weight.numel()
    x = torch.randn(5, 256)
    with record_kernels() as ran:
        y = nn.functional.linear(x, w)
    assert ran == ["linear:packed_weight_mm", "packed_weight_mm"]
    assert bounds[0] - 2 < compute_error(x @ weight.t(), y) < bounds[1] + 2


@every_case
def test_save_load_and_compile(recipe, bits, bounds, tmp_path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), torch.randn(3, 64)
    quantize_(model, {"0": recipe, "2": int8_weight_only()})
    wanted = model(x)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), wanted)
    save_quantized(model, tmp_path / "m.safetensors")
    with torch.device("meta"):
        fresh = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))
    assert torch.equal(load_quantized(fresh, tmp_path / "m.safetensors")(x), wanted)
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe


def test_one_bit_symmetric_is_zero_and_one_side() -> None:
    w = intx_weight_only(torch.int1).apply(torch.randn(8, 64))
    assert set(w.plain()[0].unique().tolist()) <= {-1, 0}


def test_dtypes_by_name_or_torch() -> None:
    assert uintx_weight_only(torch.uint3) == uintx_weight_only("uint3") == uintx_weight_only("torch.uint3")
    assert str(uintx_weight_only(torch.uint3, 32)) == "uintx_weight_only(dtype=uint3, group_size=32)"
    assert (
        intx_weight_only("int5", mapping_type=MappingType.ASYMMETRIC).apply(torch.randn(2, 64)).zero_point is not None
    )
    for make, wrong, text in [
        (uintx_weight_only, torch.int4, "uintx_weight_only takes uint1 to uint7, got int4"),
        (uintx_weight_only, torch.uint8, "uintx_weight_only takes uint1 to uint7, got uint8"),
        (intx_weight_only, "uint4", "intx_weight_only takes int1 to int7, got uint4"),
    ]:
        with pytest.raises(ValueError, match=text):
            make(wrong)


@pytest.mark.parametrize("recipe", [case[0] for case in HQQ], ids=str)
def test_use_hqq(recipe) -> None:
    spelled_out = replace(recipe, scale_rule=HQQRule(), use_hqq=False)
    assert recipe.linear_spec() == spelled_out.linear_spec() == replace(recipe, scale_rule=HQQRule()).linear_spec()
    weight = torch.randn(96, 256)
    gain = [compute_error(weight, r.apply(weight).dequantize()) for r in (recipe, replace(recipe, use_hqq=False))]
    assert gain[1] + 0.2 < gain[0] < gain[1] + 4
    with pytest.raises(ValueError, match=f"{recipe.name}: use_hqq=True is scale_rule=HQQRule.., got scale_rule=MSER"):
        replace(recipe, scale_rule=MSERule())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_is_the_same_in_every_layout(dtype: torch.dtype) -> None:
    weight, x = torch.randn(80, 256, dtype=dtype), torch.randn(4, 256, dtype=dtype)
    outputs = []
    for layout, kernel in [
        (PackedLayout(), "packed_weight_mm"),
        (PlainLayout(), "weight_only_mm"),
        (TensorCoreTiledLayout(), "int4_tiled_mm"),
    ]:
        w = int4_weight_only(64, FLOAT, layout=layout).apply(weight)
        with record_kernels() as ran:
            outputs.append(nn.functional.linear(x, w))
        assert ran[0] == f"linear:{kernel}"
    assert torch.equal(outputs[0], outputs[1])
    assert compute_error(outputs[0], outputs[2]) > (38 if dtype == torch.bfloat16 else 110)


def test_tiled_int4_needs_real_zero_points() -> None:
    with pytest.raises(ValueError, match="takes zero points of the FLOAT domain, the weight has zero_point_domain INT"):
        int4_weight_only(layout=TensorCoreTiledLayout())


def test_a_layer_that_does_not_fit_is_named_before_any_is_changed() -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(48, 8))
    before = list(model.parameters())
    with pytest.raises(ValueError, match=r"quantize_: 1: .*takes groups of 32, 64, 128 or 256 along a row.*\(1, 48\)"):
        quantize_(model, {"0": int4_weight_only(32), "1": int4_weight_only(-1, FLOAT, layout=TensorCoreTiledLayout())})
    assert all(a is b for a, b in zip(before, model.parameters()))


def test_names() -> None:
    for name in ("uintx_weight_only", "intx_weight_only"):
        assert getattr(qtorch, name) is getattr(qtorch.quantize_api, name)
