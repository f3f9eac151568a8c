"""Dequantized copies of weights: when they are made, when they go, and that nothing else sees them."""

import copy
import gc
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import qtorch
from qtorch.kernels.cpu import compiled_library, float_copies, variants

pytestmark = pytest.mark.skipif(compiled_library.library() is None, reason="nothing is built")

COPY = "cpu_weight_only_mm.float_copy"
BYTES = 64 * 96 * 4


@pytest.fixture(autouse=True)
def _copies():
    """Room for two, and the variant that uses them. Tables are read again when nothing is patched any more."""
    float_copies.clear()
    with qtorch.config.patch(float_copy_bytes=2 * BYTES), variants.force("float"):
        yield
    float_copies.clear()
    variants.forget()


def layer(recipe=None) -> torch.nn.Linear:
    made = torch.nn.Linear(96, 64).requires_grad_(False)
    qtorch.quantize_(made, recipe or qtorch.int4_weight_only(group_size=32))
    return made


def runs(model: torch.nn.Module, x: torch.Tensor) -> str:
    """The last kernel."""
    with qtorch.kernels.record_kernels() as ran:
        y = model(x)
    wanted = torch.nn.functional.linear(x, model.weight.dequantize(x.dtype), model.bias.to(x.dtype))
    torch.testing.assert_close(y, wanted, rtol=1e-2 if x.dtype == torch.bfloat16 else 1e-5, atol=1e-2)
    return ran[-1]


X = torch.randn(5, 96)


def test_made_once_and_anew_of_a_changed_weight():
    model = layer()
    assert runs(model, X) == COPY
    assert float_copies.used() == BYTES
    made = next(iter(float_copies._entries.values())).copy
    assert runs(model, X) == COPY
    assert next(iter(float_copies._entries.values())).copy is made
    model = layer()
    assert runs(model, X) == COPY
    model.bfloat16()
    assert runs(model, X.bfloat16()) == COPY
    assert float_copies.used() in (BYTES // 2, BYTES * 3 // 2)
    model, other = layer(), layer()
    before = model(X)
    model.load_state_dict(other.state_dict())
    assert runs(model, X) == COPY
    assert not torch.equal(model(X), before)
    model.weight.scale.mul_(2)
    assert runs(model, X) == COPY
    with torch.no_grad():
        model.weight[3:5].copy_(other.weight[:2])
    assert runs(model, X) == COPY


def test_none_by_default_and_only_where_it_is_faster(monkeypatch):
    with qtorch.config.patch(float_copy_bytes=0):
        assert runs(layer(), X).endswith(".float")
        assert "qtorch.config.float_copy_bytes" in str(qtorch.explain(layer()))
    assert qtorch.config.__class__().float_copy_bytes == 0
    assert float_copies.used() == 0
    # Writing to them leaves no trace.
    with torch.inference_mode():
        assert runs(layer(), X).endswith(".float")
        assert float_copies.used() == 0
    # The second list of choices decides; without room the first.
    key = variants.key_of(torch.float32, True, True, 64 * 96)
    monkeypatch.setattr(variants, "_forced", [])
    monkeypatch.setattr(variants, "_find", variants._find.__wrapped__)
    table = {key: [[None, "dot"]], f"{key} copied": [[4, "tile"], [None, "float"]]}
    monkeypatch.setattr(variants, "_tables", lambda instruction_set: [(variants.processor_kind(), table)])
    model = layer()
    assert runs(model, X[:4]).endswith(".dot")
    assert runs(model, X) == COPY
    with qtorch.config.patch(float_copy_bytes=BYTES - 1):
        float_copies.clear()
        assert runs(model, X).endswith(".dot")


def test_the_limit_and_weights_that_move():
    models = [layer() for _ in range(3)]
    assert [runs(model, X) == COPY for model in models] == [True, True, False]
    assert float_copies.used() == 2 * BYTES
    del models[0]
    gc.collect()
    assert float_copies.used() == BYTES, "a copy goes with its weight"
    assert runs(models[1], X) == COPY
    with qtorch.config.patch(float_copy_bytes=0):
        assert runs(models[1], X) != COPY
    assert float_copies.used() == 0
    model = layer()
    runs(model, X)
    assert len(pickle.dumps(model)) == len(pickle.dumps(layer()))
    twin = copy.deepcopy(model)
    assert float_copies.used() == BYTES
    model.to("meta")
    gc.collect()
    assert float_copies.used() == 0
    assert runs(twin, X) == COPY


def test_compiled_and_from_eight_threads():
    model = layer()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 7):
        x = torch.randn(rows, 96)
        with qtorch.kernels.record_kernels() as ran:
            y = compiled(x)
        assert ran[-1] == COPY
        torch.testing.assert_close(y, model(x))
    assert float_copies.used() == BYTES
    models = [layer() for _ in range(4)]
    expected = [model(X) for model in models]
    float_copies.clear()
    with ThreadPoolExecutor(8) as pool:
        for i, y in enumerate(pool.map(lambda i: models[i % 4](X), range(200))):
            torch.testing.assert_close(y, expected[i % 4])
    assert float_copies.used() == 2 * BYTES


PER_ROW, GROUPS = qtorch.int8_weight_only(), qtorch.int4_weight_only(group_size=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe, kernel", [
    (GROUPS, "packed_weight_mm.float_copy"), (qtorch.lut_weight_only(4, 32), "lut_weight_mm.float_copy"),
    (qtorch.intx_weight_only("int3", group_size=16), "packed_weight_mm.float_copy"),
    (qtorch.float8_weight_only(), "weight_only_mm.float_copy"), (qtorch.lut_weight_only(3), "lut_weight_mm.float_copy"),
])  # fmt: skip
@pytest.mark.usefixtures("torch_kernels")
def test_without_compiled_kernels(recipe, kernel, dtype):
    model = layer(recipe).to(dtype)
    assert all(runs(model, torch.randn(rows, 96, dtype=dtype)) == kernel for rows in (1, 5))
    assert float_copies.used() == 64 * 96 * dtype.itemsize
    with qtorch.config.patch(float_copy_bytes=BYTES // 4):
        float_copies.clear()
        assert runs(model, torch.randn(2, 96, dtype=dtype)) == kernel.partition(".")[0]
    model = layer(qtorch.nvfp4_weight_only())  # its scales are numbers for a call only
    runs(model, X)
    model.weight.scale.copy_(model.weight.scale.flip(0))
    assert [runs(model, X) for _ in "ab"] == ["packed_weight_mm"] * 2


@pytest.mark.usefixtures("torch_kernels")
def test_no_copy_where_codes_are_faster_or_the_weight_is_a_view():
    assert "float_copy" not in runs(layer(PER_ROW), X)
    weight = layer(GROUPS).weight
    x = torch.randn(3, 64)
    torch.testing.assert_close(x @ weight, x @ weight.dequantize(), rtol=1e-5, atol=1e-4)
    assert float_copies.used() == 0
