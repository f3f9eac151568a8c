"""Experts of transformers' mixtures: each implementation ends in the products of experts, also in a graph."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import qtorch
from qtorch.integrations.transformers import QtorchConfig
from qtorch.integrations.transformers.experts_interface import takes_experts_implementation
from tests.fast_part import slow_but
from tests.integrations.transformers.tiny_models import CASES, EXPERTS, I8, build
from tests.kernels.cpu.builds import NEEDS_LIBRARY

SIZES = {"hidden_size": 64, "num_experts_per_tok": 2}
CLASSES: dict[str, tuple[Any, Any]] = {
    "mixtral": (MixtralExperts, hf.MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=5)),
    "qwen3_moe": (Qwen3MoeExperts, hf.Qwen3MoeConfig(**SIZES, moe_intermediate_size=96, num_experts=5)),
    "gpt_oss": (GptOssExperts, hf.GptOssConfig(**SIZES, intermediate_size=96, num_local_experts=5)),
}
if hasattr(hf, "NemotronHConfig"):  # since 5.3
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    of_nemotron = hf.NemotronHConfig(**SIZES, moe_intermediate_size=96, n_routed_experts=5)
    CLASSES["nemotron_h"] = (NemotronHExperts, of_nemotron)
RECIPES = {
    "int8": (qtorch.int8_weight_only(), "cpu_experts_mm"),
    "int4": (qtorch.int4_weight_only(group_size=32), "cpu_experts_mm"),
    "w8a8": (qtorch.int8_dynamic_activation_int8_weight(), "cpu_experts_int8_mm"),
    "w4a8": (qtorch.int8_dynamic_activation_int4_weight(group_size=32), "cpu_experts_int8_mm"),
    "nf4": (qtorch.nf4_weight_only(group_size=32), "cpu_experts_lut_mm"),
    "vectors": (qtorch.vector_codebook_weight_only(), "experts_as_linear_layers"),
}
IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm", "qtorch"]
NEEDS_CHOICE = pytest.mark.skipif(
    not takes_experts_implementation(build("mixtral"), "qtorch"), reason="this transformers takes its own ones only"
)


def make(name: str, recipe: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    """A module of experts; matrices that are stored as (E, K, N) are quantized along K."""
    kind, config = CLASSES[name]
    torch.manual_seed(0)
    experts = kind(copy.deepcopy(config)).eval().requires_grad_(False)
    for parameter_name, parameter in list(experts.named_parameters()):
        parameter.data = parameter.data.normal_(0, 0.3).to(dtype)
        if recipe is not None and parameter.dim() == 3:
            values = parameter.transpose(1, 2).contiguous() if experts.is_transposed else parameter
            weight = recipe.apply(values)
            stored = weight.transpose(1, 2) if experts.is_transposed else weight
            setattr(experts, parameter_name, torch.nn.Parameter(stored, requires_grad=False))
    return experts


def dequantized(name: str, experts: Any) -> Any:
    """A module in floating point with the weights of a quantized one."""
    made = make(name)
    for parameter_name, parameter in experts.named_parameters():
        if parameter.dim() == 3:
            setattr(made, parameter_name, torch.nn.Parameter(parameter.dequantize(), requires_grad=False))
    return made


def run(experts: Any, implementation: str, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
    experts.config._experts_implementation = implementation
    return experts(x, *routing)


def routing(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts for each token; expert 3 has none."""
    experts = torch.stack([torch.tensor([0, 1, 2, 4])[torch.randperm(4)[:2]] for _ in range(tokens)])
    return experts, torch.rand(tokens, 2).to(dtype)


@NEEDS_LIBRARY
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", CLASSES)
def test_every_implementation(name: str, recipe: str) -> None:
    """The same kernels, and the numbers of the dequantized weights."""
    chosen, kernel = RECIPES[recipe]
    experts = make(name, chosen)
    # Static or dynamic, the codes of the activation are noise of their own.
    least = 20 if "a8" in recipe else 100
    for tokens in (1, 9):
        x, where = torch.randn(tokens, 64), routing(tokens)
        wanted = run(dequantized(name, experts), "grouped_mm", x, *where)
        for implementation in IMPLEMENTATIONS:
            with qtorch.kernels.record_kernels() as ran:
                y = run(experts, implementation, x, *where)
            assert least < qtorch.compute_error(wanted, y)
            products = [each for each in ran if each.startswith("grouped_linear:")]
            one_by_one = implementation == "eager" or (implementation == "batched_mm" and recipe == "vectors")
            assert products == ([] if one_by_one else [f"grouped_linear:{kernel}"] * 2)


@NEEDS_LIBRARY
@pytest.mark.parametrize(("recipe", "dtype"), [("int4", torch.float), ("w8a8", torch.bfloat16), ("nf4", torch.float)])
@pytest.mark.parametrize("name", slow_but(["gpt_oss"], CLASSES))
def test_one_graph(name: str, recipe: str, dtype: torch.dtype) -> None:
    experts = make(name, RECIPES[recipe][0], dtype)
    x, where = torch.randn(5, 64).to(dtype), routing(5, dtype)
    for implementation in IMPLEMENTATIONS[1:]:
        torch.compiler.reset()
        wanted = run(experts, implementation, x, *where)
        y = torch.compile(experts, fullgraph=True, backend="aot_eager")(x, *where)
        torch.testing.assert_close(y, wanted)


@pytest.mark.slow
@NEEDS_LIBRARY
def test_inductor() -> None:
    experts, x, where = make("qwen3_moe", RECIPES["int4"][0]), torch.randn(5, 64), routing(5)
    for implementation in ("grouped_mm", "qtorch"):
        torch.compiler.reset()
        wanted = run(experts, implementation, x, *where)
        with qtorch.kernels.record_kernels() as ran:
            y = torch.compile(experts, fullgraph=True)(x, *where)
        assert sum(each == "cpu_experts_mm" for each in ran) == 2
        assert qtorch.compute_error(wanted, y) > 100


def test_pieces_floats_and_gradients() -> None:
    """As for the float model: how many experts there are depends on the data, so no graph holds the loop."""
    for name in ("mixtral", "gpt_oss"):
        torch.compiler.reset()
        experts, x, where = make(name, RECIPES["int8"][0]), torch.randn(5, 64), routing(5)
        wanted = run(experts, "eager", x, *where)
        torch.testing.assert_close(torch.compile(experts, backend="aot_eager")(x, *where), wanted)
    # Also beside quantized ones.
    experts, x, where = make("mixtral"), torch.randn(4, 64), routing(4)
    assert torch.equal(run(experts, "qtorch", x, *where), run(experts, "grouped_mm", x, *where))
    experts.down_proj = torch.nn.Parameter(RECIPES["int8"][0].apply(experts.down_proj), requires_grad=False)
    assert torch.equal(run(experts, "qtorch", x, *where), run(experts, "grouped_mm", x, *where))
    experts, where = make("mixtral", RECIPES["int8"][0]), routing(6)
    for implementation in ("grouped_mm", "qtorch"):
        torch.compiler.reset()
        x = torch.randn(6, 64, requires_grad=True)
        run(experts, implementation, x, *where).sum().backward()
        wanted, x.grad = x.grad, None
        torch.compile(experts, fullgraph=True, backend="aot_eager")(x, *where).sum().backward()
        torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("recipe", ["int8", "w8a8", "nf4"])
@pytest.mark.parametrize("name", CLASSES)
def test_gradients_of_the_input(name: str, recipe: str, implementation: str) -> None:
    """Straight through the codes of the activation: that of the dequantized weights."""
    experts = make(name, RECIPES[recipe][0])
    where, grads = routing(6), []
    x = torch.randn(6, 64)
    for module in (dequantized(name, experts), experts):
        leaf, weights = x.clone().requires_grad_(), where[1].clone().requires_grad_()
        run(module, implementation, leaf, where[0], weights).square().sum().backward()
        grads.append(torch.cat([leaf.grad, weights.grad], 1))  # type: ignore[list-item]
    assert qtorch.compute_error(grads[0], grads[1]) > (15 if recipe == "w8a8" else 90)


@NEEDS_LIBRARY
def test_autocast() -> None:
    experts, x, where = make("mixtral", RECIPES["int8"][0]), torch.randn(5, 64), routing(5)
    wanted = run(experts, "qtorch", x, *where)
    for implementation in IMPLEMENTATIONS[2:]:
        with torch.autocast("cpu", torch.bfloat16), qtorch.kernels.record_kernels() as ran:
            y = run(experts, implementation, x, *where)
        assert "grouped_linear:cpu_experts_mm" in ran
        assert 30 < qtorch.compute_error(wanted, y) < 70


@pytest.mark.skipif(not hasattr(make("mixtral"), "_is_expert_parallel"), reason="this transformers skips no experts")
def test_experts_of_other_devices() -> None:
    """Under expert parallelism an index beyond the last is a token of another device, and adds nothing."""
    for name in CLASSES:
        experts, x = make(name, RECIPES["int8"][0]), torch.randn(4, 64)
        index, weights = torch.tensor([[0, 5], [5, 5], [2, 1], [5, 4]]), torch.rand(4, 2)
        experts._is_expert_parallel = True
        wanted = grouped_mm_experts_forward(experts, x, index, weights)
        torch.testing.assert_close(run(experts, "qtorch", x, index, weights), wanted)
        assert not wanted[1].any()


@NEEDS_CHOICE
def test_loading_chooses_the_implementation(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path / "float")
    kind, ids = type(model), torch.arange(6)[None]
    load = lambda folder, **more: kind.from_pretrained(tmp_path / folder, **more).eval()  # noqa: E731
    quantized = load("float", quantization_config=QtorchConfig({EXPERTS: I8}))
    assert quantized.config._experts_implementation == "qtorch"
    quantized.save_pretrained(tmp_path / "quantized")
    assert load("quantized").config._experts_implementation == "qtorch"
    asked = load("quantized", experts_implementation="eager")
    assert asked.config._experts_implementation == "eager"
    assert qtorch.compute_error(asked(ids).logits, quantized(ids).logits) > 90
    dense = load("float", quantization_config=QtorchConfig({r".*q_proj": I8}))
    assert dense.config._experts_implementation == "grouped_mm"
    qtorch.quantize_(model, {EXPERTS: I8})
    assert model.config._experts_implementation == "grouped_mm"
    model.set_experts_implementation("qtorch")
    assert qtorch.compute_error(model(ids).logits, quantized(ids).logits) > 90
    assert torch.equal(model.generate(ids, max_new_tokens=4), quantized.generate(ids, max_new_tokens=4))


@NEEDS_CHOICE
def test_every_case_with_experts_generates_as_before() -> None:
    for name in CASES:
        if "moe" not in name and "mixtral" not in name:
            continue
        model, ids = build(name), torch.arange(6)[None]
        qtorch.quantize_(model, {EXPERTS: I8})
        wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
        for implementation in ("eager", "qtorch"):
            model.set_experts_implementation(implementation)
            assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)
