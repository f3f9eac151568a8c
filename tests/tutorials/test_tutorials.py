"""Tutorials in their short forms: they run, and what they say is so."""

import copy
from collections.abc import Iterator

import pytest
import torch

from qtorch.dtypes import ConvWeight
from qtorch.kernels import record_kernels
from qtorch.primitives.layouts import LAYOUTS
from qtorch.primitives.qdtype import QDTYPES
from tutorials import low_bit_optimizers, print_op_and_shapes, trainable_tensor_subclass


def bits_of(model: torch.nn.Module) -> list[int]:
    """Of the weights of convolutions, and of the head."""
    convs = [module.weight for module in model.modules() if isinstance(module, torch.nn.Conv2d)]
    assert all(type(weight) is ConvWeight for weight in convs)
    return [weight.scheme.weight.dtype.bits for weight in (*convs, model.head.weight)]


def test_low_bit_digits(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    from tutorials import low_bit_digits

    table = low_bit_digits.main(["--short"])
    assert list(table) == ["float", "int4", "binary"]
    assert all(0 < value < 100 for row in table.values() for value in row)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["seed", *table]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits", "at_least"), [("binary", 1, 50), ("int4", 4, 60)])
def test_low_bit_digits_converge(name: str, bits: int, at_least: float) -> None:
    """From the start, in three epochs of half the digits, far above the 10% of chance."""
    pytest.importorskip("sklearn")
    from tutorials import low_bit_digits

    data = low_bit_digits.Digits.load()
    model = low_bit_digits.trained(name, data, 3, 8)
    assert low_bit_digits.accuracy(model, data) > at_least
    found = bits_of(model)
    assert found == [8, *[bits] * (len(found) - 2), 8]
    if bits == 1:
        weight = [module.weight for module in model.modules() if isinstance(module, torch.nn.Conv2d)][1]
        assert weight.matrix.inner_tensors["qdata"].nbytes * 8 == weight.numel()
        assert len(weight.dequantize().abs().flatten(1).unique(dim=1)) == len(weight)


@pytest.mark.slow
def test_low_bit_optimizers() -> None:
    """Losses near torch's, a part of its memory, and an exact resume."""
    said: list[str] = []
    results = low_bit_optimizers.main(["--short"], said.append)
    loss, size = results.pop("torch AdamW")
    assert 7.9 < size < 8.1
    resumed = results.pop("resumed")
    sizes = {name: of_one[1] for name, of_one in results.items()}
    assert sizes["AdamW4bit"] < 1.2 < 2.0 < sizes["AdamW8bit"] < 2.2
    assert sizes["AdamW4bit"] < sizes["AdamW4bit, embedding in fp32"] < sizes["AdamW8bit"]
    assert all(abs(of_one[0] / loss - 1) < 0.05 for of_one in results.values())
    assert all(of_one[0] != loss for of_one in results.values())
    assert len(said) == 7
    # The last steps of the resumed run are those of the whole one.
    model, optimizer, schedule = low_bit_optimizers.start(low_bit_optimizers.OPTIMIZERS["AdamW8bit"], 12)
    low_bit_optimizers.train(model, optimizer, schedule, range(6))
    assert low_bit_optimizers.train(model, optimizer, schedule, range(6, 12))[0] == resumed[0]


@pytest.fixture
def registered() -> Iterator[None]:
    """Tests over all layouts and formats that run later in this process do not see those of the tutorial."""
    layouts, formats = dict(LAYOUTS), dict(QDTYPES)
    yield
    for registry, before in ((LAYOUTS, layouts), (QDTYPES, formats)):
        for name in set(registry) - set(before):
            del registry[name]


@pytest.mark.usefixtures("registered")
def test_own_dtype_and_layout() -> None:
    """Layouts change sizes and no number."""
    pytest.importorskip("sklearn")
    from tutorials import own_dtype_and_layout

    said: list[str] = []
    results = own_dtype_and_layout.main(["--short"], said.append)
    weights, groups = 64 * 256 + 256 * 10, (64 * 256 + 256 * 10) // 16
    packed = weights // 2 + 4 * groups
    assert {name: size for name, (_, size) in results.items()} == {
        **{"float": 4 * weights, "plain": weights + 4 * groups},
        **dict.fromkeys(["packed", "bit_planes", "with a kernel"], packed),
    }
    in_float, *others = [accuracy for accuracy, _ in results.values()]
    assert 50 < in_float <= 100
    assert len(set(others)) == 1, "the same numbers in every layout"
    assert in_float - 10 < others[0] <= 100
    assert any("without a kernel" in line and "reference implementation" in line for line in said)
    assert any(line.endswith("bit_planes_mm") for line in said)
    assert said[-1].endswith("the same weights")


@pytest.mark.usefixtures("torch_kernels")
def test_print_op_and_shapes() -> None:
    """What is printed, of a float and of a quantized model, in the order of the calls."""
    said: list[str] = []
    print_op_and_shapes.main(["--recipe", "int8_dynamic_activation_int8_weight", "--train"], said.append)
    starts = [i for i, line in enumerate(said) if line.startswith("---")]
    in_float, quantized, training = (said[a:b] for a, b in zip(starts, [*starts[1:], len(said)]))

    assert in_float[1] == "F.linear(fp32[3, 64], fp32[128, 64], fp32[128])"
    assert "  aten.addmm.default(fp32[128], fp32[3, 64], fp32[64, 128]) -> fp32[3, 128]" in in_float
    assert sum("aten.mm.default" in line for line in in_float) == 3, "the first layer has no gradient of its input"

    assert quantized[1] == "F.linear(fp32[3, 64], int8[128, 64] (plain), fp32[128])"
    assert quantized.count("    > linear:int8_scaled_mm") == 2
    assert "  aten.gelu.default(fp32[3, 128]) -> fp32[3, 128]" in quantized
    assert not any("addmm" in line for line in quantized)

    assert training[1] == "F.linear(fp32[3, 64], fp32[128, 64] (in training), fp32[128])"
    assert training.count("    > int_matmul") == 5, "three products a layer, but the gradient of the model's input"


def test_print_op_and_shapes_and_trainable_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    net = print_op_and_shapes.model()
    with print_op_and_shapes.print_op_and_shapes():
        net[1](net[0].bias)
    inside = capsys.readouterr().out
    net[1](net[0].bias)
    assert inside.splitlines() == ["F.gelu(fp32[128])", "  aten.gelu.default(fp32[128]) -> fp32[128]"]
    assert capsys.readouterr().out == ""
    # Both implementations agree, and both learn.
    said: list[str] = []
    results = trainable_tensor_subclass.main(["--short"], said.append)
    for product, (against_float, by_hand) in results["products"].items():
        assert by_hand > 110, product
        assert against_float > 110 if product == "grad_weight" else 17 < against_float < 30
    for name in ("float", "by hand", "by the spec"):
        first, last, accuracy = results[name]
        assert last < first / 2, name
        assert 60 < accuracy <= 100, name
    assert sum("loss" in line for line in said) >= 3 * 5


@pytest.mark.slow
def test_qat_digits(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    from tutorials import qat_digits

    table = qat_digits.main(["--short"])
    assert list(table) == ["float", "PTQ", "QAT", "LSQ"]
    assert all(0 < value < 100 for row in table.values() for value in row)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-5:]] == ["accuracy,", *table]


def test_what_qat_digits_serves() -> None:
    """Integers of 2 bits, of 8 at the edges, in kernels that sum integers."""
    pytest.importorskip("sklearn")
    from tutorials import qat_digits

    data = qat_digits.Digits.load()
    model = qat_digits.train(qat_digits.ResNet(8), data, 1, 1e-2, 4)
    for served in (
        qat_digits.with_ptq(copy.deepcopy(model), 2, data),
        qat_digits.with_qat(copy.deepcopy(model), 2, data, 1, 2),
        qat_digits.with_lsq(copy.deepcopy(model), 2, data, 1, 2),
    ):
        found = bits_of(served)
        assert found == [8, *[2] * (len(found) - 2), 8]
        with record_kernels() as ran:
            qat_digits.accuracy(served, data)
        linear = [kernel for kernel in ran if kernel.startswith("linear:")]
        assert len(linear) >= len(found)
        assert all("int8" in kernel for kernel in linear)


@pytest.mark.slow
def test_qat_llama() -> None:
    """Conversion changes no perplexity: it checks that itself."""
    pytest.importorskip("transformers")
    from tutorials import qat_llama

    said: list[str] = []
    results = qat_llama.learn(qat_llama.SHORT, said.append)
    assert set(results) == set(qat_llama.SCHEMES)
    for name, found in results.items():
        assert list(found) == ["float", "PTQ", *qat_llama.SCHEMES[name].trains]
        assert len(set(found.values())) == len(found)
        assert all(1 < value < 256 for value in found.values())
    assert sum("recovered" in line for line in said) == sum(len(s.trains) for s in qat_llama.SCHEMES.values())
