"""Tables of powers: their values, the nearest of them, and their form in files."""

import json

import pytest
import torch

from qtorch.primitives import PowerSpec, from_json, power_table, to_json
from qtorch.primitives.codebooks import power_spec
from tests.refusals import refuses

SPECS = [("uint8", 4, True), ("uint8", 4, False), ("uint4", 2, True), ("uint4", 2, False), ("uint5", 2, True)]


@pytest.mark.parametrize("dtype, power, signed", SPECS)
def test_values_are_powers_of_equidistant_numbers(dtype: str, power: int, signed: bool) -> None:
    bits = int(dtype[4:])
    table = torch.tensor(power_table(bits, power, signed), dtype=torch.float64)
    highest = 2 ** (bits - 1) - 1 if signed else 2**bits - 1
    codes = torch.arange(2**bits, dtype=torch.float64) - (2 ** (bits - 1) if signed else 0)
    exact = codes.sign() * (codes.abs() / highest) ** power
    assert ((table - exact).abs() <= 1e-6 * exact.abs()).all()
    assert 0.0 in table
    assert 1.0 in table
    assert (-1.0 in table) == signed
    assert (table.diff() > 0).all()


@pytest.mark.parametrize("dtype, power, signed", SPECS)
def test_codes_are_the_nearest(dtype: str, power: int, signed: bool) -> None:
    """By comparison with every value, in fp64, also a little below and above the middle of any two."""
    spec = power_spec(dtype, power, signed)
    x = torch.randn(40, 200) * 10 ** (torch.rand(40, 200) * 8 - 8)
    x = x if signed else x.abs()
    table = torch.tensor(spec.table)
    table = table[1:] if signed else table  # no code stands for less than -1
    middles = (table[1:] + table[:-1]) / 2
    x = torch.cat([torch.zeros(2, 300), torch.nn.functional.pad(x, (0, 100))])
    x[0, : len(middles)], x[1, : len(middles)] = middles * (1 - 1e-6), middles * (1 + 1e-6)
    x[:2, -1] = 1.0
    scale, values = spec.choose_qparams(x)
    codes = spec.quantize(x, scale, values)
    place = (x / scale).double()
    distance = (place[..., None] - table.double()).abs()
    chosen = distance.gather(-1, codes.long()[..., None] - int(signed)).squeeze(-1)
    # Middles and places are rounded to fp32.
    assert (chosen - distance.amin(-1) <= 2.0**-21 * place.abs()).all()
    nearer, further = (codes[row, : len(middles)].int() for row in range(2))
    assert torch.equal(further - nearer, middles.sign().int())
    assert torch.equal(torch.minimum(nearer, further), torch.arange(len(middles), dtype=torch.int32) + int(signed))
    assert codes.unique().numel() > 10


def test_file() -> None:
    spec = power_spec("uint8", 4, True)
    text = json.dumps(to_json(spec))
    assert len(text) < 300, "the table is not written"
    assert from_json(json.loads(text)) == spec
    assert from_json(json.loads(text)).table is spec.table
    assert spec != power_spec("uint8", 4, False)


def test_arguments() -> None:
    refuses("power 2 or 4", lambda: power_spec("uint8", 3, True))
    refuses("computes its table", lambda: PowerSpec("uint4", table=tuple(range(16)), power=2))
