"""Look-up: the best kernel that accepts, once; ties and fallbacks are said."""

import warnings

import pytest
import torch
from expecttest import assert_expected_inline
from torch.nn import functional

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, PerBlock, QuantSpec
from qtorch.kernels import FallbackError, deregister, lookup, record_kernels, register
from qtorch.kernels.registry import Problem, candidates, choose
from tests.refusals import refuses


@pytest.fixture
def weight():
    return AffineQuantizedTensor.from_float(torch.randn(8, 16), QuantSpec("int8", quant_min=-127))


@pytest.fixture
def kernel():
    """Register a kernel of `linear` for the test."""
    names = []

    def add(name, **needs):
        @register("linear", name=name, **needs)
        def function(x, weight, bias):
            return torch.full((*x.shape[:-1], 8), float(len(name)))

        names.append(name)

    yield add
    for name in names:
        deregister("linear", name)


def test_the_highest_priority_runs(weight, kernel):
    kernel("low", priority=50)
    kernel("higher", priority=60)
    with record_kernels() as ran:
        y = functional.linear(torch.randn(2, 16), weight)
    assert ran == ["linear:higher"]
    assert (y == 6).all()


def test_a_kernel_that_rejects_is_passed_over(weight, kernel, torch_kernels):
    mine = {
        "picky": {"priority": 90, "supports": lambda problem: "is picky"},
        "elsewhere": {"priority": 80, "device": "cuda"},
        "other layout": {"priority": 70, "layout": "tiled"},
        "other layouts": {"priority": 65, "layout": ("tiled", "packed")},
        "other weight": {"priority": 60, "weight": ("int4", "int2")},
        "dynamic": {"priority": 50, "activation": ("int8",)},
        "two layouts": {"priority": 5, "layout": ("plain", "packed")},
    }
    for name, needs in mine.items():
        kernel(name, **needs)
    problem = Problem("linear", weight.scheme, torch.float32, "cpu")
    assert choose(problem).name == "weight_only_mm"
    shown = {*mine, "int8_weight_mm", "weight_only_mm"}
    reasons = [f"{k.name}: {reason}" for k, reason in candidates(problem) if k.name in shown]
    assert candidates(problem)[-1][0].name == "reference"
    assert_expected_inline(
        "\n".join(reasons),
        """\
picky: is picky
elsewhere: runs on cuda, the input is on cpu
other layout: reads the tiled layout, the weight has plain
other layouts: reads the packed or tiled layout, the weight has plain
other weight: takes int2 or int4 weights, this one is int8
dynamic: needs quantized activations, the scheme is weight-only
int8_weight_mm: takes bf16 or fp16 activations, got float32
weight_only_mm: None
two layouts: None""",
    )


def test_a_tie_is_an_error(weight, kernel):
    kernel("one", priority=50)
    kernel("two", priority=50)
    with pytest.raises(RuntimeError, match=r"one and two both take linear on weight int8 .* with priority 50"):
        functional.linear(torch.randn(2, 16), weight)


def test_candidates_are_asked_once(weight, kernel):
    asked = []
    kernel("counting", priority=50, supports=lambda problem: asked.append(problem) or "no")
    for _ in range(3):
        functional.linear(torch.randn(2, 16), weight)
    assert len(asked) == 1
    functional.linear(torch.randn(2, 16).bfloat16(), weight.bfloat16())
    assert len(asked) == 2, "another dtype is another problem"


def test_what_is_refused(weight, kernel):
    kernel("mine", priority=50)
    refuses("linear has a kernel named mine already", lambda: kernel("mine"))
    refuses("linear has no kernel named nobody", lambda: deregister("linear", "nobody"))
    with pytest.raises(NotImplementedError, match="no kernel registered for the operation 'fft'"):
        lookup("fft", weight.scheme, torch.float32, "cpu")
    with pytest.raises(ValueError, match="no setting strickt; it has strict"), qtorch.config.patch(strickt=True):
        pass


def blocked(size: int) -> AffineQuantizedTensor:
    """A weight that only the reference takes: blocks over output channels, with quantized activations."""
    spec = LinearSpec(QuantSpec("int8", PerBlock((size, 8))), QuantSpec("int8"))
    return AffineQuantizedTensor.from_float(torch.randn(8, 16), spec)


def test_fallback_is_said_once():
    weight, x = blocked(4), torch.randn(2, 16)
    with warnings.catch_warnings(record=True) as caught, record_kernels() as ran:
        warnings.simplefilter("always")
        for _ in range(3):
            functional.linear(x, weight)
    assert [name for name in ran if name.startswith("linear")] == ["linear:reference"] * 3
    ours = [str(w.message) for w in caught if "qtorch" in str(w.message)]
    assert len(ours) == 1
    assert ours[0].startswith(
        "qtorch: linear on a cpu float32 input with weight int8 PerBlock(sizes=(4, 8)) symmetric, dynamic activation "
        "int8 PerRow() symmetric, layout PlainLayout() runs the reference implementation, correct but slow: "
    )
    reason = "int8_scaled_mm takes a scale of its own for each output channel, the weight has PerBlock(sizes=(4, 8))"
    assert reason in ours[0].partition("slow: ")[2].split("; ")


def test_strict_makes_falling_back_an_error():
    weight, x = blocked(2), torch.randn(2, 16)
    with qtorch.config.patch(strict=True), pytest.raises(FallbackError, match="runs the reference implementation"):
        functional.linear(x, weight)
    with pytest.warns(UserWarning, match="runs the reference implementation"):
        functional.linear(x, weight)
