"""What is reported: the table after quantizing, and explanations of what runs."""

import dataclasses
import json
import re
import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import qtorch
from qtorch import explain, quantize_
from qtorch.kernels import FallbackError, register, registry
from qtorch.model.report import LayerReport

pytestmark = pytest.mark.usefixtures("torch_kernels")

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.


class Tied(nn.Module):
    """An embedding that is the head too, a layer, and bare experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 32)
        self.fc = nn.Linear(32, 32)
        self.experts = nn.Parameter(torch.randn(2, 32, 64))
        self.head = nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight


RECIPES = {
    "fc": qtorch.int8_dynamic_activation_int8_weight(),
    "experts": qtorch.int4_weight_only(group_size=32),
    "embed": None,
}


def report_of(model: nn.Module, recipe: object = None, **options: bool) -> qtorch.QuantizeReport:
    return qtorch.quantize_(model, recipe or RECIPES, **options)


def test_tables_of_weights() -> None:
    assert_expected_inline(
        str(report_of(Tied())),
        """\
quantized 2 of 3 weights, 90.4% of all parameters; the model: 22,656 -> 6,016 bytes (26.6%); left in floating point: embed.weight (9.0%: None for 'embed')

weight                      shape    what                                   bytes before  after  SQNR dB  kernel
----------------------------------------------------------------------------------------------------------------------------------
experts                     2x32x64  int4_weight_only(group_size=32)        16,384        2,688  21.9     experts_as_linear_layers
embed.weight = head.weight  16x32    skipped: None for 'embed'              2,048
fc.weight                   32x32    int8_dynamic_activation_int8_weight()  4,096         1,152  48.5     int8_scaled_mm
these 2 weights: 20,480 -> 3,840 bytes (18.8%)""",  # noqa: E501
    )
    assert_expected_inline(
        str(report_of(Tied(), qtorch.int8_weight_only(), dry_run=True)),
        """\
would quantize 2 of 3 weights, 27.1% of all parameters; the model: 22,656 -> 18,240 bytes (80.5%); left in floating point: experts (72.3%: a bare parameter of Tied; ask for it by name)

weight                      shape    what                                                   bytes before  after  SQNR dB  kernel
----------------------------------------------------------------------------------------------------------------------------------------
experts                     2x32x64  skipped: a bare parameter of Tied; ask for it by name  16,384
head.weight = embed.weight  16x32    int8_weight_only()                                     2,048         576    44.9     weight_only_mm
fc.weight                   32x32    int8_weight_only()                                     4,096         1,152  48.5     weight_only_mm
these 2 weights: 6,144 -> 1,728 bytes (28.1%)""",  # noqa: E501
    )


def test_json() -> None:
    data = report_of(Tied()).to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert {key: data[key] for key in data if key not in ("layers", "advice")} == {
        "dry_run": False, "bytes_before": 20480, "bytes_after": 3840, "model_bytes_before": 22656,
        "model_bytes_after": 6016, "parameters": 5664, "quantized_parameters": 5120, "transforms": [],
    }  # fmt: skip
    (skipped,) = [layer for layer in data["layers"] if layer["action"] == "skipped"]
    assert skipped["shape"] == [16, 32]
    assert (skipped["detail"], skipped["also"], skipped["sqnr"]) == ("None for 'embed'", ["head.weight"], None)
    report = report_of(Tied())
    for layer, data in zip(report.layers, report.to_json()["layers"], strict=True):
        assert LayerReport(**{**data, "shape": tuple(data["shape"]), "also": tuple(data["also"])}) == layer


def test_values_experts_and_tied_weights() -> None:
    report = report_of(Tied())
    assert report == report_of(Tied())
    assert repr(report) == f"<QuantizeReport: {str(report).splitlines()[0]}>"
    assert report != report_of(Tied(), dry_run=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.dry_run = False
    model = Tied()
    report = report_of(model)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    assert {layer.name: layer.bytes_after for layer in report.layers} == {
        name: size for name, size in sizes.items() if name != "fc.bias"
    }
    layer = nn.Module()
    layer.experts = nn.Parameter(torch.randn(4, 32, 64))
    quantize_(layer, {"experts": qtorch.int4_weight_only(group_size=32)})
    transposed = layer.experts.transpose(1, 2)
    for explanation in (*explain(layer), explain(transposed)):
        assert (explanation.problem.op, explanation.problem.scheme.shape) == ("grouped_linear", (4, 32, 64))
        assert explanation.kernel == "experts_as_linear_layers"
    tied = nn.Sequential()
    tied.embed, tied.head = nn.Embedding(16, 32), nn.Linear(32, 16)
    tied.head.weight = tied.embed.weight
    quantize_(tied, {"embed": qtorch.int8_weight_only()})
    assert [(e.name, e.problem.op) for e in explain(tied)] == [("embed.weight", "embedding"), ("head.weight", "linear")]


# get_model_size_in_bytes counts what is held, once.


def model() -> nn.ModuleDict:
    layers = nn.ModuleDict({"embed": nn.Embedding(10, 32), "bags": nn.EmbeddingBag(20, 32), "fc": nn.Linear(32, 16)})
    layers.register_buffer("mean", torch.zeros(32, dtype=torch.float16))
    return layers


def test_sizes_and_weights_without_error() -> None:
    assert qtorch.get_model_size_in_bytes(model()) == 4 * (10 * 32 + 20 * 32 + 32 * 16 + 16) + 2 * 32
    assert qtorch.get_model_size_in_bytes(nn.Linear(4, 4, bias=False)) == 4 * 16
    assert qtorch.get_model_size_in_bytes(nn.ReLU()) == 0
    layers = model()
    qtorch.quantize_(layers, {"fc": qtorch.int4_weight_only(group_size=16), "embed": qtorch.int8_weight_only()})
    # Codes of a byte and fp32 scales per row; half a byte, an fp32 scale and a byte of zero point per group.
    embed, fc = 10 * 32 + 10 * 4, 32 * 16 // 2 + 16 * 2 * (4 + 1)
    assert qtorch.get_model_size_in_bytes(layers) == embed + 4 * 20 * 32 + fc + 4 * 16 + 2 * 32
    assert qtorch.get_model_size_in_bytes(model(), ignore_embeddings=True) == 4 * (32 * 16 + 16) + 2 * 32
    # SQNR is infinite, or 0 / 0.
    exact = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        exact[0].weight.zero_()
        exact[1].weight.copy_(torch.eye(8) * 127)
    report = report_of(exact, qtorch.int8_weight_only())
    assert str(report)
    read = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [layer["sqnr"] for layer in read["layers"]] == [None] * 2


@pytest.mark.parametrize("ignore_embeddings", [False, True])
def test_tied_weights_count_once(ignore_embeddings: bool) -> None:
    layers = nn.ModuleDict({"embed": nn.Embedding(10, 32), "head": nn.Linear(32, 10, bias=False)})
    layers["head"].weight = layers["embed"].weight
    assert qtorch.get_model_size_in_bytes(layers, ignore_embeddings) == 4 * 10 * 32


# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.


def only_reference(block: int) -> tuple[Tensor, Tensor]:
    """(input, weight) of a scheme that no kernel takes: blocks of rows with int8 activations. What has been warned of
    is remembered for the process, so every test takes a block of its own."""
    spec = qtorch.LinearSpec(
        qtorch.QuantSpec(torch.int8, qtorch.PerBlock((2, block))), qtorch.QuantSpec(torch.int8, qtorch.PerToken())
    )
    return torch.randn(3, 2 * block), qtorch.AffineQuantizedTensor.from_float(torch.randn(4, 2 * block), spec)


def model_of_explain() -> nn.Module:
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
    explanations = explain(model_of_explain())
    assert isinstance(explanations, qtorch.model.explain.Explanations)
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


def test_kernels_have_a_verdict_and_dtypes() -> None:
    (explanation,) = explain(model_of_explain().first)
    verdicts = {explanation.kernel, *(name for name, _ in explanation.rejected)}
    assert verdicts == {kernel.name for kernel, _ in registry.candidates(explanation.problem)}
    assert all(reason for _, reason in explanation.rejected)
    # bf16 has a kernel of its own on CPU, and a note on its accuracy.
    layer = nn.Linear(32, 8)
    quantize_(layer, qtorch.int8_weight_only())
    assert explain(layer)[0].kernel == "weight_only_mm"
    (explanation,) = explain(layer, torch.ones(1, 32, dtype=torch.bfloat16))
    assert explanation.kernel == "int8_weight_mm"
    assert explanation.note in str(explanation)
    assert "bfloat16 input on cpu" in str(explanation)
    assert explain(model_of_explain(), torch.zeros(1, dtype=torch.long))[1].problem.dtype == torch.float32
    x, weight = only_reference(block=12)
    with warnings.catch_warnings(), qtorch.config.patch(strict=True):
        warnings.simplefilter("error")
        explanation = explain(weight, x)
    assert explanation.kernel == "reference"
    assert "not int8_scaled_mm: takes a scale of its own for each output channel" in str(explanation)


@pytest.mark.parametrize(("what", "message"), [
    (nn.Linear(4, 4), "explain: no weight of this Linear is quantized"),
    (torch.ones(2, 2), "explain: the weight is a plain Tensor, not a quantized tensor"),
    (nn.Parameter(torch.ones(2, 2)), "explain: the weight is a plain Parameter, not a quantized tensor"),
])  # fmt: skip
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


def test_new_kernels_strict_and_config() -> None:
    layer = nn.Linear(32, 8)
    quantize_(layer, qtorch.int8_weight_only())

    @register("linear", weight=("int8",), activation=(), priority=50, supports=lambda problem: "is only a test")
    def unwilling(x: Tensor, weight: qtorch.AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
        raise AssertionError

    try:
        assert ("unwilling", "is only a test") in explain(layer)[0].rejected
    finally:
        qtorch.kernels.deregister("linear", "unwilling")
    x, weight = only_reference(block=13)
    with qtorch.config.patch(strict=True):
        for _ in range(2):  # the second look-up, out of the cache, as well
            with pytest.raises(FallbackError, match=r"correct but slow: .*int8_scaled_mm takes a scale"):
                nn.functional.linear(x, weight)
    with pytest.warns(UserWarning, match="runs the reference implementation"):
        nn.functional.linear(x, weight)
    assert not qtorch.config.strict
    with pytest.raises(ZeroDivisionError), qtorch.config.patch(strict=True) as patched:
        _ = 1 / (not patched.strict)
    assert not qtorch.config.strict
    with pytest.raises(ValueError, match=r"qtorch\.config has no setting strickt; it has strict"):
        qtorch.config.patch(strickt=True).__enter__()
