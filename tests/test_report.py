"""QuantizeReport: the table, the totals, the JSON."""

import dataclasses
import json

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import qtorch
from qtorch.model.report import LayerReport

# Names of kernels below are of those made of torch operators; tests/kernels/cpu has the compiled ones.
pytestmark = pytest.mark.usefixtures("torch_kernels")


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


def test_table() -> None:
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


def test_table_of_tied_weights_and_of_a_dry_run() -> None:
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


def test_bytes_are_those_that_the_model_holds() -> None:
    model = Tied()
    report = report_of(model)
    sizes = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    assert {layer.name: layer.bytes_after for layer in report.layers} == {
        name: size for name, size in sizes.items() if name != "fc.bias"
    }


def test_json_round_trip() -> None:
    data = report_of(Tied()).to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert {key: data[key] for key in data if key not in ("layers", "advice")} == {
        "dry_run": False,
        "bytes_before": 20480,
        "bytes_after": 3840,
        "model_bytes_before": 22656,
        "model_bytes_after": 6016,
        "parameters": 5664,
        "quantized_parameters": 5120,
        "transforms": [],
    }
    (skipped,) = [layer for layer in data["layers"] if layer["action"] == "skipped"]
    assert skipped["shape"] == [16, 32]
    assert (skipped["detail"], skipped["also"], skipped["sqnr"]) == ("None for 'embed'", ["head.weight"], None)


def test_json_holds_every_field() -> None:
    report = report_of(Tied())
    for layer, data in zip(report.layers, report.to_json()["layers"], strict=True):
        assert LayerReport(**{**data, "shape": tuple(data["shape"]), "also": tuple(data["also"])}) == layer


def test_weights_without_error_are_json_too() -> None:
    """SQNR is infinite, or 0 / 0."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].weight.zero_()
        model[1].weight.copy_(torch.eye(8) * 127)
    report = report_of(model, qtorch.int8_weight_only())
    assert str(report)
    assert [layer["sqnr"] for layer in json.loads(json.dumps(report.to_json(), allow_nan=False))["layers"]] == [
        None
    ] * 2


def test_a_report_is_a_value() -> None:
    report = report_of(Tied())
    assert report == report_of(Tied())
    assert repr(report) == f"<QuantizeReport: {str(report).splitlines()[0]}>"
    assert report != report_of(Tied(), dry_run=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.dry_run = False


# get_model_size_in_bytes counts what is held, once.


def model() -> nn.ModuleDict:
    layers = nn.ModuleDict({"embed": nn.Embedding(10, 32), "bags": nn.EmbeddingBag(20, 32), "fc": nn.Linear(32, 16)})
    layers.register_buffer("mean", torch.zeros(32, dtype=torch.float16))
    return layers


def test_parameters_and_buffers() -> None:
    assert qtorch.get_model_size_in_bytes(model()) == 4 * (10 * 32 + 20 * 32 + 32 * 16 + 16) + 2 * 32
    assert qtorch.get_model_size_in_bytes(nn.Linear(4, 4, bias=False)) == 4 * 16
    assert qtorch.get_model_size_in_bytes(nn.ReLU()) == 0


def test_quantized_weights() -> None:
    layers = model()
    qtorch.quantize_(layers, {"fc": qtorch.int4_weight_only(group_size=16), "embed": qtorch.int8_weight_only()})
    # Codes of a byte and fp32 scales per row; half a byte, an fp32 scale and a byte of zero point per group.
    embed, fc = 10 * 32 + 10 * 4, 32 * 16 // 2 + 16 * 2 * (4 + 1)
    assert qtorch.get_model_size_in_bytes(layers) == embed + 4 * 20 * 32 + fc + 4 * 16 + 2 * 32


def test_without_embeddings() -> None:
    assert qtorch.get_model_size_in_bytes(model(), ignore_embeddings=True) == 4 * (32 * 16 + 16) + 2 * 32


@pytest.mark.parametrize("ignore_embeddings", [False, True])
def test_tied_weights_count_once(ignore_embeddings: bool) -> None:
    layers = nn.ModuleDict({"embed": nn.Embedding(10, 32), "head": nn.Linear(32, 10, bias=False)})
    layers["head"].weight = layers["embed"].weight
    assert qtorch.get_model_size_in_bytes(layers, ignore_embeddings) == 4 * 10 * 32
