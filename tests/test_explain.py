"""explain: which kernel runs and why each other one does not; strict mode; warnings."""

import re
import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import qtorch
from qtorch import explain, quantize_
from qtorch.kernels import FallbackError, register
from qtorch.kernels.registry import candidates
from qtorch.model.explain import Explanations

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")


def only_reference(block: int) -> tuple[Tensor, Tensor]:
    """(input, weight) of a scheme that no kernel takes: blocks of rows with int8 activations. What has been warned of
    is remembered for the process, so every test takes a block of its own."""
    spec = qtorch.LinearSpec(
        qtorch.QuantSpec(torch.int8, qtorch.PerBlock((2, block))), qtorch.QuantSpec(torch.int8, qtorch.PerToken())
    )
    return torch.randn(3, 2 * block), qtorch.AffineQuantizedTensor.from_float(torch.randn(4, 2 * block), spec)


def model() -> nn.Module:
    result = nn.Sequential()
    result.embed = nn.Embedding(16, 32)
    result.first = nn.Linear(32, 32)
    result.last = nn.Linear(32, 8)
    quantize_(result, {"embed": qtorch.int8_weight_only(), "first": qtorch.int8_dynamic_activation_int8_weight()})
    return result


def test_weight() -> None:
    explanation = explain(qtorch.int4_weight_only(group_size=16).apply(torch.randn(8, 32)))
    assert_expected_inline(
        "\n".join(str(explanation).splitlines()[:2]),
        """\
linear, float32 input on cpu, weight uint4 PerGroup(group_size=16) asymmetric, PackedLayout()
  runs packed_weight_mm (dequantizes on each call: on CPU it saves memory, not time)""",
    )
    reasons = {
        "cpu_int8_mm": "needs quantized activations, the scheme is weight-only",
        "cpu_lut_mm": "takes a CodebookSpec, the weight has a QuantSpec",
        "cpu_weight_only_mm": "is switched off",
        "cuda_weight_mm": "runs on cuda, the input is on cpu",
        "int8_scaled_mm": "reads the plain layout, the weight has packed",
        "emulated_scaled_mm": "takes activations in floating-point codes",
        "reference": "comes after it",
    }
    assert reasons.items() <= dict(explanation.rejected).items()
    assert all(f"  not {kernel}: {reason}" in str(explanation) for kernel, reason in explanation.rejected)


def test_model() -> None:
    explanations = explain(model())
    assert isinstance(explanations, Explanations)
    lines = str(explanations).splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if not line.startswith("  not ")),
        """\
embed.weight: embedding, float32 input on cpu, weight int8 PerRow() symmetric, PlainLayout()
  runs gather_rows (on CPU it saves memory, not time)
first.weight: linear, float32 input on cpu, weight int8 PerRow() symmetric, dynamic activation int8 PerToken() symmetric, PlainLayout()
  runs int8_scaled_mm (where the weight has groups, on CPU it saves memory, not time)""",  # noqa: E501
    )
    for reason in (
        "cpu_embedding: is switched off",
        "cpu_weight_only_mm: is weight-only, the scheme quantizes activations",
    ):
        assert f"  not {reason}" in lines


def test_input_dtype_decides() -> None:
    """bf16 has a kernel of its own on CPU, and a note on its accuracy."""
    layer = nn.Linear(32, 8)
    quantize_(layer, qtorch.int8_weight_only())
    assert explain(layer)[0].kernel == "weight_only_mm"
    (explanation,) = explain(layer, torch.ones(1, 32, dtype=torch.bfloat16))
    assert explanation.kernel == "int8_weight_mm"
    assert explanation.note in str(explanation)
    assert "bfloat16 input on cpu" in str(explanation)


def test_integer_input_says_nothing_about_the_dtype() -> None:
    assert explain(model(), torch.zeros(1, dtype=torch.long))[1].problem.dtype == torch.float32


def test_every_kernel_has_a_verdict() -> None:
    (explanation,) = explain(model().first)
    verdicts = {explanation.kernel, *(name for name, _ in explanation.rejected)}
    assert verdicts == {kernel.name for kernel, _ in candidates(explanation.problem)}
    assert all(reason for _, reason in explanation.rejected)


def test_experts_are_explained_as_one_product() -> None:
    layer = nn.Module()
    layer.experts = nn.Parameter(torch.randn(4, 32, 64))
    quantize_(layer, {"experts": qtorch.int4_weight_only(group_size=32)})
    transposed = layer.experts.transpose(1, 2)
    for explanation in (*explain(layer), explain(transposed)):
        assert (explanation.problem.op, explanation.problem.scheme.shape) == ("grouped_linear", (4, 32, 64))
        assert explanation.kernel == "experts_as_linear_layers"


def test_tied_weight_is_explained_in_each_place() -> None:
    tied = nn.Sequential()
    tied.embed, tied.head = nn.Embedding(16, 32), nn.Linear(32, 16)
    tied.head.weight = tied.embed.weight
    quantize_(tied, {"embed": qtorch.int8_weight_only()})
    assert [(e.name, e.problem.op) for e in explain(tied)] == [("embed.weight", "embedding"), ("head.weight", "linear")]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (nn.Linear(4, 4), "explain: no weight of this Linear is quantized"),
        (torch.ones(2, 2), "explain: the weight is a plain Tensor, not a quantized tensor"),
        (nn.Parameter(torch.ones(2, 2)), "explain: the weight is a plain Parameter, not a quantized tensor"),
    ],
)
def test_nothing_to_explain(what: nn.Module | Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        explain(what)


def test_fallback_warns_once_for_each_reason() -> None:
    x, weight = only_reference(block=11)
    with pytest.warns(UserWarning, match="runs the reference implementation") as caught:
        nn.functional.linear(x, weight)
    assert_expected_inline(
        str(caught[0].message).replace(": ", ":\n").replace("; ", ";\n"),
        """\
qtorch:
linear on a cpu float32 input with weight int8 PerBlock(sizes=(2, 11)) symmetric, dynamic activation int8 PerToken() symmetric, layout PlainLayout() runs the reference implementation, correct but slow:
cpu_int8_mm takes a scale of its own for each output channel, the weight has PerBlock(sizes=(2, 11));
cpu_lut_mm takes a CodebookSpec, the weight has a QuantSpec;
cpu_transposed_lut_mm takes a CodebookSpec, the weight has a QuantSpec;
cpu_transposed_mm is weight-only, the scheme quantizes activations;
cpu_weight_only_mm is weight-only, the scheme quantizes activations;
int8_block_mm takes activations in blocks along the contracted axis, the scheme has PerToken();
int8_scaled_mm takes a scale of its own for each output channel, the weight has PerBlock(sizes=(2, 11));
int8_weight_mm is weight-only, the scheme quantizes activations;
lut_weight_mm takes a CodebookSpec, the weight has a QuantSpec;
weight_only_mm is weight-only, the scheme quantizes activations;
emulated_scaled_mm takes activations in floating-point codes""",  # noqa: E501
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.functional.linear(x, weight)
    with pytest.warns(UserWarning, match="bfloat16 input"):
        nn.functional.linear(x.bfloat16(), weight.bfloat16())


def test_explaining_a_fallback_does_not_warn() -> None:
    x, weight = only_reference(block=12)
    with warnings.catch_warnings(), qtorch.config.patch(strict=True):
        warnings.simplefilter("error")
        explanation = explain(weight, x)
    assert explanation.kernel == "reference"
    assert "not int8_scaled_mm: takes a scale of its own for each output channel" in str(explanation)


def test_strict() -> None:
    x, weight = only_reference(block=13)
    with qtorch.config.patch(strict=True):
        for _ in range(2):  # the second look-up, out of the cache, as well
            with pytest.raises(FallbackError, match=r"correct but slow: .*int8_scaled_mm takes a scale"):
                nn.functional.linear(x, weight)
    with pytest.warns(UserWarning, match="runs the reference implementation"):
        nn.functional.linear(x, weight)


def test_config_patch() -> None:
    assert not qtorch.config.strict
    with pytest.raises(ZeroDivisionError), qtorch.config.patch(strict=True) as patched:
        _ = 1 / (not patched.strict)
    assert not qtorch.config.strict
    with pytest.raises(ValueError, match=r"qtorch\.config has no setting strickt; it has strict"):
        qtorch.config.patch(strickt=True).__enter__()


def test_a_new_kernel_is_explained() -> None:
    layer = nn.Linear(32, 8)
    quantize_(layer, qtorch.int8_weight_only())

    @register("linear", weight=("int8",), activation=(), priority=50, supports=lambda problem: "is only a test")
    def unwilling(x: Tensor, weight: qtorch.AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
        raise AssertionError

    try:
        assert ("unwilling", "is only a test") in explain(layer)[0].rejected
    finally:
        qtorch.kernels.deregister("linear", "unwilling")
