"""fuse_projections: layers of one input are one product, with the same bits, state and files."""

import contextlib
import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import qtorch
from qtorch.checkpoint.save_folder import SAVE_FORMATS
from tests.every_recipe import NAMES, make
from tests.movement.holding import through_file
from tests.refusals import refuses

X = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Attention, here or to another input, and a gated layer."""

    def __init__(self, bias=False, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n, bias) for n in (64, 32, 32))
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias), nn.Linear(64, 96, bias)

    def forward(self, x, other=None):
        keys = x if other is None else other
        y = nn.functional.softmax(self.q_proj(x)[..., :32] @ self.k_proj(keys).mT, -1) @ self.v_proj(keys)
        return nn.functional.silu(self.gate_proj(x)) * self.up_proj(x), y


def products(ran):
    return sum(name.startswith("linear:") for name in ran)


def same(got, wanted):
    return all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_every_recipe(name, tmp_path):
    model = Block(bias=name == "int8_weight_only")
    qtorch.quantize_(model, make(name, 32), on_misfit="skip")
    fused = copy.deepcopy(model)
    report = qtorch.fuse_projections(fused)
    assert {*report.fused, *(path for path, _ in report.skipped)} == {"q_proj", "gate_proj"}
    for x in (X[:1, :1], X):
        with qtorch.kernels.record_kernels() as apart:
            wanted = model(x)
        with qtorch.kernels.record_kernels() as joined:
            got = fused(x)
        torch.testing.assert_close(got, wanted)
        # A product in torch operators is a BLAS's, whose sums may depend on the number of outputs.
        compiled = [name for name in joined if name.count(".") == 2 and not name.endswith(".float")]
        assert same(got, wanted) or len(compiled) < products(joined)
        saved = {"q_proj": 2, "gate_proj": 1}
        assert products(joined) == products(apart) - sum(saved[path] for path in report.fused)
    assert same(through_file(fused, weights_only=False)(X), got)
    # The state is that of the model before, and is loaded into either.
    state, before = fused.state_dict(), model.state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[key].dequantize(), before[key].dequantize()) for key in state if "weight" in key)
    qtorch.save_quantized(fused, tmp_path / "file")
    damaged = {key: tensor for key, tensor in before.items() if not key.startswith("k_proj")}
    qtorch.save_quantized(damaged, tmp_path / "damaged")
    refuses("missing key k_proj.weight", lambda: qtorch.load_quantized(fused, tmp_path / "damaged"))
    for into in (Block(bias=name == "int8_weight_only"), copy.deepcopy(fused)):
        assert same(qtorch.load_quantized(into, tmp_path / "file")(X), got if hasattr(into.q_proj, "parts") else wanted)
    (tmp_path / "fused").mkdir()
    for format in SAVE_FORMATS:
        with contextlib.suppress(ValueError):  # of a format that cannot hold the recipe
            qtorch.save_quantized(model, tmp_path / format, format=format)
    for folder in (saved := [tmp_path / format for format in SAVE_FORMATS if (tmp_path / format).exists()]):
        qtorch.save_quantized(fused, tmp_path / "fused" / folder.name, format=folder.name)
        ours, wanted_file = (load_file(of / folder.name / "model.safetensors") for of in (tmp_path / "fused", tmp_path))
        assert ours.keys() == wanted_file.keys()
        assert all(torch.equal(ours[key], wanted_file[key]) for key in ours)
    assert saved
    other = Block(seed=2, bias=name == "int8_weight_only")
    qtorch.quantize_(other, make(name, 32), on_misfit="skip")
    fused.load_state_dict(other.state_dict())
    torch.testing.assert_close(fused(X), other(X))
    model.load_state_dict(fused.state_dict())
    assert same(model(X), other(X))


def test_compiled_and_with_another_input():
    model = Block().requires_grad_(False)
    qtorch.quantize_(model, qtorch.int4_weight_only(group_size=32))
    fused = copy.deepcopy(model)
    assert str(qtorch.fuse_projections(fused)) == "2 of 2 groups of layers are one product"
    compiled = torch.compile(copy.deepcopy(fused), fullgraph=True, backend="aot_eager")
    assert same(compiled(X), model(X))
    assert torch.equal(fused.k_proj.weight.dequantize(), model.k_proj.weight.dequantize())
    with qtorch.kernels.record_kernels() as ran:
        for _ in range(2):
            assert same(fused(X, X + 1), model(X, X + 1))
        assert (fused.q_proj.apart, fused.gate_proj.apart) == (True, False)
    assert products(ran) == 2 * (4 + 5)  # those of queries, keys and values are apart, each of its rows
    assert same(fused(X), model(X))


def test_what_is_left_apart():
    model = nn.ModuleDict({name: Block() for name in ("fine", "hook", "normed", "wide", "some", "trained")})
    model["hook"].k_proj.register_forward_hook(lambda *_: None)
    weight_norm(model["normed"].q_proj)
    model["wide"].up_proj = nn.Linear(32, 96, bias=False)
    model["some"].v_proj.bias = nn.Parameter(torch.zeros(32))
    qtorch.quantize_(model["trained"], qtorch.training.int8_mixed_precision_training())
    report = qtorch.fuse_projections(model)
    whole = {f"{name}.gate_proj" for name in ("fine", "hook", "normed", "some")}
    assert set(report.fused) == whole | {"fine.q_proj", "wide.q_proj"}
    words = {
        "hook": "has hooks", "normed": "not a plain", "wide": "width or bias", "some": "or bias", "trained": "training",
    }  # fmt: skip
    assert all(words[path.split(".")[0]] in reason for path, reason in report.skipped)
    assert f"{len(report.fused)} of 12 groups" in str(report)
    refuses("fuse_projections: Linear has no layers ", lambda: qtorch.fuse_projections(nn.Linear(2, 2)))
    refuses("got None", lambda: qtorch.fuse_projections(None), TypeError)
