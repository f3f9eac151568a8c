"""Every architecture of the zoo: what int8 weight-only reaches, and that the model does what it did before."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtorch import QuantizeReport, find_uses, int8_weight_only, load_quantized, quantize_, save_quantized
from qtorch.dtypes import QuantizedTensor
from qtorch.model.targets import find_targets
from qtorch.model.uses import Uses
from tests.fast_part import slow_but
from tests.zoo.architectures import ARCHITECTURES, built, output_of

pytestmark = pytest.mark.filterwarnings("ignore")

LEAST, MOST = 5e-4, 0.03
"""Relative error of the outputs. int8 with a scale per row has errors of about 2^-8 / sqrt(3) of the largest weight of
the row in each product, that is 0.2% to 0.5% of its output, and these models have 5 to 20 products in a row."""

EACH = pytest.mark.parametrize("name", list(ARCHITECTURES))


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def multiplied(uses: Uses) -> dict[str, int]:
    """Number of elements of each parameter that takes part in products, tied ones once."""
    return {name: torch.Size(of.shape).numel() for name, of in uses.items() if of.contractions}


def test_the_zoo_is_large() -> None:
    assert len(ARCHITECTURES) >= 24


@EACH
def test_what_multiplies_is_quantized_or_the_report_says_why_not(name: str) -> None:
    model, batch = built(name)
    wanted = output_of(model, batch)
    sizes = multiplied(find_uses(model, **batch))
    report = quantize_(model, int8_weight_only())
    parameters = {key: p for key, p in model.named_parameters() if key in sizes}
    left = [key for key, p in parameters.items() if not isinstance(p, QuantizedTensor)]
    reasons = {row.name: row.detail for row in report.skipped}
    for key in left:
        assert re.match(r"a router|a convolution|is parametrized", reasons[key]), (key, reasons[key])
    reached = 1 - sum(sizes[key] for key in left) / sum(sizes[key] for key in parameters)
    assert reached >= 0.95 or any(reasons[key].startswith("a convolution") for key in left), reached
    assert {row.name for row in report.quantized} <= sizes.keys()  # nothing else
    check_first_line(report)
    assert LEAST < relative_error(output_of(model, batch), wanted) < MOST


def check_first_line(report: QuantizeReport) -> None:
    """It says which share of all parameters is quantized."""
    first, _, _ = str(report).partition("\n")
    share = report.quantized_parameters / report.parameters
    assert f"{share:.1%} of all parameters" in first


@pytest.mark.parametrize("name", slow_but(["gpt2", "gpt_oss", "mamba2", "convnext", "whisper"], ARCHITECTURES))
def test_everything_that_can_be_quantized(name: str) -> None:
    model, batch = built(name)
    wanted = output_of(model, batch)
    sizes = multiplied(find_uses(model, **batch))
    report = quantize_(model, int8_weight_only(), targets="all")
    left = {row.name: row.detail for row in report.skipped if row.name in sizes}
    assert all(reason.startswith("is parametrized") for reason in left.values()), left
    assert LEAST < relative_error(output_of(model, batch), wanted) < MOST


@EACH
def test_kinds_agree_with_what_the_model_does(name: str) -> None:
    """The axis that the registry says is the one that products sum over; what it does not know, they do not use."""
    model, batch = built(name)
    uses = find_uses(model, **batch)
    for target in find_targets(model, int8_weight_only(), None):
        for slot in target.slots:
            of = uses[slot.name]
            if slot.kind.obstacle or not of.contractions:
                continue
            assert slot.kind.name, (slot.name, str(of))
            assert not of.obstacle, (slot.name, of.obstacle)
            assert slot.kind.is_conv == of.is_convolution, slot.name
            assert slot.kind.is_transposed == (of.axis == -2), (slot.name, str(of))


@pytest.mark.parametrize("name", slow_but(["gpt2", "gpt_oss", "recurrent_gemma"], ARCHITECTURES))
def test_targets_that_a_run_has_found(name: str) -> None:
    """The same weights and bits as by the registry; convolutions beside."""
    model, batch = built(name)
    other = copy.deepcopy(model)
    quantize_(model, int8_weight_only(), targets=("linear", "convolution"))
    quantize_(other, int8_weight_only(), targets=find_uses(other, **batch))
    assert torch.equal(output_of(model, batch), output_of(other, batch))


@pytest.mark.parametrize("name", slow_but(["gpt2", "gpt_oss", "mamba2"], ARCHITECTURES))
def test_files_and_copies_have_the_same_bits(name: str, tmp_path: Path) -> None:
    model, batch = built(name)
    quantize_(model, int8_weight_only(), targets="all")
    wanted = output_of(model, batch)
    assert torch.equal(output_of(copy.deepcopy(model), batch), wanted)
    save_quantized(model, tmp_path / "model.safetensors")
    fresh, _ = built(name)
    load_quantized(fresh, tmp_path / "model.safetensors")
    assert torch.equal(output_of(fresh, batch), wanted)
    again, _ = built(name)
    quantize_(again, int8_weight_only(), targets="all")
    again.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(output_of(again, batch), wanted)


@pytest.mark.parametrize("name", slow_but(["gpt2", "mixtral"], ARCHITECTURES))
def test_generates_with_a_dynamic_and_a_static_cache(name: str) -> None:
    if not ARCHITECTURES[name].generates:
        pytest.skip("has no static cache")
    model, batch = built(name)
    quantize_(model, int8_weight_only())
    inputs = {key: value for key, value in batch.items() if key != "decoder_input_ids"}
    found = {}
    for cache in ("dynamic", "static"):
        torch.manual_seed(0)
        found[cache] = model.generate(
            **inputs,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
        )
    first, second = found.values()
    assert torch.equal(first.sequences, second.sequences)
    for one, other in zip(first.logits, second.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", slow_but(["vit"], ARCHITECTURES))
def test_one_graph_where_the_float_model_is_one(name: str) -> None:
    if not ARCHITECTURES[name].compiles:
        pytest.skip("the float model is not one graph")
    model, batch = built(name)
    quantize_(model, int8_weight_only())
    wanted = output_of(model, batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(output_of(compiled, batch), wanted) < 1e-5
