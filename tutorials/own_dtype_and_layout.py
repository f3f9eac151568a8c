"""An own number format and an own layout, on a small classifier of handwritten digits.

    python -m tutorials.own_dtype_and_layout            a minute
    python -m tutorials.own_dtype_and_layout --short    few epochs, to see that it runs

The format is `float4_e3m0`: a sign and a power of two, so that a product is a shift. The layout keeps each bit of the
codes in a plane of its own: a device that multiplies bit by bit reads only the planes it needs.

1. A format is a `QDType` with the bounds of its codes; a `QuantSpec` of it quantizes a tensor.
2. A layout packs and unpacks codes, and changes no number.
3. A recipe puts the two together for `quantize_`; saving and loading work at once.
4. Without a kernel for the layout, the reference implementation runs and says so; a kernel of three lines replaces it.

docs/extending has a page on each of these.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import qtorch
from qtorch import LinearSpec, PackedLayout, PerGroup, PlainLayout, QuantSpec, ZeroPointDomain
from qtorch.kernels import deregister, register
from qtorch.primitives import QDType
from qtorch.primitives.floatx import FloatFormat
from qtorch.primitives.layouts import Layout, register_layout
from qtorch.primitives.layouts.base import Form, Plain
from qtorch.primitives.qdtype import QDTYPES
from qtorch.primitives.spec import Scheme
from qtorch.recipes.base import WeightRecipe, register_recipe
from tutorials.qat_digits import Digits, train

# --- 1. the format ---

E3M0 = FloatFormat(ebits=3, mbits=0)
POWER_OF_TWO = QDType(E3M0.name, E3M0.bits, -E3M0.max, E3M0.max, torch.uint8, is_floating_point=True, format=E3M0)
QDTYPES.setdefault(POWER_OF_TWO.name, POWER_OF_TWO)

WEIGHT = QuantSpec(POWER_OF_TWO, PerGroup(16), zero_point_domain=ZeroPointDomain.NONE)


# --- 2. the layout ---


@register_layout
@dataclass(frozen=True)
class BitPlanesLayout(Layout):
    """Unsigned codes of b bits, (..., K), as b planes (..., ceil(K / 8)) of eight columns a byte."""

    name = "bit_planes"
    tensors = ("qdata", "scale", "zero_point")

    def check_spec(self, weight: QuantSpec) -> None:
        if weight.dtype.storage is not torch.uint8:
            raise ValueError(f"BitPlanesLayout takes codes in uint8, the weight has {weight.dtype}")

    def check(self, scheme: Scheme) -> None:
        super().check(scheme)
        if not scheme.shape:
            raise ValueError("BitPlanesLayout takes tensors of one dimension or more")

    def codes_forms(self, scheme: Scheme) -> tuple[Form, ...]:
        *rows, columns = scheme.codes_shape
        return (Form((scheme.weight.dtype.bits, *rows, -(-columns // 8)), {torch.uint8}),)

    def pack(self, plain: Plain, scheme: Scheme) -> dict[str, Tensor]:
        codes, scale, zero_point = plain
        eights = functional.pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
        shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
        planes = [((eights >> bit & 1) << shifts).sum(-1, dtype=torch.uint8) for bit in range(scheme.weight.dtype.bits)]
        tensors = {"qdata": torch.stack(planes), "scale": scale}
        return tensors if zero_point is None else {**tensors, "zero_point": zero_point}

    def unpack(self, tensors: dict[str, Tensor | None], scheme: Scheme) -> Plain:
        planes = tensors["qdata"]
        shifts = torch.arange(8, dtype=torch.uint8, device=planes.device)
        bits = (planes.unsqueeze(-1) >> shifts & 1).flatten(-2)[..., : scheme.codes_shape[-1]]
        codes = torch.zeros_like(bits[0])
        for bit, plane in enumerate(bits):
            codes |= plane << bit
        return codes, tensors["scale"], tensors["zero_point"]


# --- 3. the recipe ---


@register_recipe("tutorial_power_of_two_weight_only")
@dataclass(frozen=True)
class PowerOfTwoWeightOnly(WeightRecipe):
    layout: Layout = PackedLayout()

    def linear_spec(self) -> LinearSpec:
        return LinearSpec(WEIGHT, layout=self.layout)


# --- 4. the kernel ---


def bit_planes_mm(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Linear with any weight-only scheme in this layout."""
    return functional.linear(x, weight.dequantize(x.dtype), None if bias is None else bias.to(x.dtype))


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> dict[str, tuple[float, int]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="few epochs, to see that it runs")
    epochs = 4 if parser.parse_args(arguments).short else 20

    torch.manual_seed(0)
    x = torch.randn(64, 128)
    say(f"values of {POWER_OF_TWO}: 0 and {', '.join(f'{value:g}' for value in E3M0.magnitudes[1:])}, with a sign")
    say(f"SQNR of normal numbers: {qtorch.compute_error(x, WEIGHT.fake_quantize(x)):.1f} dB\n")

    data = Digits.load()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    train(model, data, epochs, 1e-2)

    @torch.no_grad()
    def measure(name: str, net: nn.Module) -> tuple[float, int]:
        right = float((net(data.test_x).argmax(1) == data.test_y).float().mean()) * 100
        size = sum(weight.nbytes for weight in net.parameters() if weight.dim() == 2)
        kernel = str(qtorch.explain(net)[0].kernel) if name != "float" else "torch"
        say(f"{name:22}{right:10.2f} %{size:10,} bytes   {kernel}")
        return right, size

    results = {"float": measure("float", model)}
    layouts: list[Layout] = [PlainLayout(), PackedLayout(), BitPlanesLayout()]
    quantized = {layout.name: copy.deepcopy(model) for layout in layouts}
    for layout in layouts:
        qtorch.quantize_(quantized[layout.name], PowerOfTwoWeightOnly(layout))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name, net in quantized.items():
            results[name] = measure(f"e3m0, {name}", net)
    for warning in said:
        say(f"\nwithout a kernel it runs {str(warning.message).partition(' runs ')[2]}")

    registered = register("linear", layout="bit_planes", activation=(), priority=10)(bit_planes_mm)
    try:
        results["with a kernel"] = measure("e3m0, with a kernel", quantized["bit_planes"])
    finally:
        deregister("linear", registered.__name__)

    with tempfile.TemporaryDirectory() as folder:
        qtorch.save_quantized(quantized["bit_planes"], Path(folder) / "digits.safetensors")
        loaded = copy.deepcopy(model)
        qtorch.load_quantized(loaded, Path(folder) / "digits.safetensors")
    same = all(torch.equal(a, b) for a, b in zip(loaded.parameters(), quantized["bit_planes"].parameters()))
    say(f"\nsaved and loaded: {'the same weights' if same else 'other weights'}")
    if not same:
        raise AssertionError("loading has changed a weight")
    return results


if __name__ == "__main__":
    main()
