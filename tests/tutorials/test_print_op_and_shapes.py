"""tutorials/print_op_and_shapes.py: what is printed, of a float and of a quantized model, in the order of the calls."""

from __future__ import annotations

import pytest

from tutorials import print_op_and_shapes


@pytest.mark.usefixtures("torch_kernels")
def test_it_runs() -> None:
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


def test_nothing_is_said_outside(capsys: pytest.CaptureFixture[str]) -> None:
    net = print_op_and_shapes.model()
    with print_op_and_shapes.print_op_and_shapes():
        net[1](net[0].bias)
    inside = capsys.readouterr().out
    net[1](net[0].bias)
    assert inside.splitlines() == ["F.gelu(fp32[128])", "  aten.gelu.default(fp32[128]) -> fp32[128]"]
    assert capsys.readouterr().out == ""
