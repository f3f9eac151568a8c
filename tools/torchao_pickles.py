"""Write a state dict of torchao for `tests/formats/test_torchao.py`, with what torchao dequantizes it to.

    pip install --no-deps --target old torchao==0.9.0
    PYTHONPATH=old:. python -m tools.torchao_pickles

The weight of every layer ``NAME`` is also there as the float tensor ``NAME.wanted``. The tiled one, which torchao packs
on a GPU alone, is packed by `pack_cuda`, whose order is tested against torch's on GPUs, and dequantized by its formula.
"""

import warnings
from pathlib import Path
from typing import Any

import torch

from qtorch.primitives.layouts.tensor_core_tiled import pack_cuda

FOLDER = Path(__file__).parents[1] / "tests" / "formats" / "torchao_pickles"
SHAPE = (8, 32)
RECIPES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "int8": (("Int8WeightOnlyConfig", "int8_weight_only"), {}),
    "int8_2": (("Int8WeightOnlyConfig",), {"version": 2}),
    "int8_dynamic": (("Int8DynamicActivationInt8WeightConfig", "int8_dynamic_activation_int8_weight"), {}),
    "int4_dynamic": (
        ("Int8DynamicActivationInt4WeightConfig", "int8_dynamic_activation_int4_weight"),
        {"group_size": 16},
    ),
    "float8": (("Float8WeightOnlyConfig", "float8_weight_only"), {}),
    "intx": (("IntxWeightOnlyConfig",), {"weight_dtype": torch.int4}),
}


def tiled(weight: Any) -> tuple[Any, torch.Tensor]:
    """`weight`, an AffineQuantizedTensor, with int4 codes in the order of a GPU, of which 16 columns are padding."""
    from torchao.dtypes import AffineQuantizedTensor, TensorCoreTiledLayout
    from torchao.dtypes.uintx.tensor_core_tiled_layout import TensorCoreTiledAQTTensorImpl
    from torchao.quantization.quant_primitives import ZeroPointDomain

    codes = torch.randint(0, 16, (8, 64), dtype=torch.uint8)
    both = torch.randn(4, 8, 2).bfloat16()
    impl = TensorCoreTiledAQTTensorImpl(pack_cuda(codes, 4), both, False, TensorCoreTiledLayout(inner_k_tiles=4))
    options = {"quant_min": 0, "quant_max": 15, "zero_point_domain": ZeroPointDomain.FLOAT, "dtype": torch.bfloat16}
    made = AffineQuantizedTensor(impl, (1, 16), torch.Size((8, 48)), **options)
    scale, zero = (part.mT.repeat_interleave(16, 1)[:, :48].float() for part in both.unbind(-1))
    return made, ((codes[:, :48].float() - 8) * scale + zero).bfloat16()


def main() -> None:
    """Write the file of the version that is installed."""
    import torchao
    from torchao import quantization

    warnings.simplefilter("ignore")
    state: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    for name, (names, options) in RECIPES.items():
        model = torch.nn.Sequential(torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)).bfloat16()
        kind = next((getattr(quantization, each) for each in names if hasattr(quantization, each)), None)
        try:
            assert kind is not None
            quantization.quantize_(model, kind(**options))
        except (AssertionError, TypeError):  # not in this version
            continue
        weight = model.state_dict()["0.weight"]
        state[f"{name}.weight"] = weight
        state[f"{name}.wanted"] = getattr(weight, "original_weight_tensor", weight).dequantize()
    state["tiled.weight"], state["tiled.wanted"] = tiled(state["int8.weight"])
    torch.save(state, FOLDER / f"torchao_{torchao.__version__}.pt")


if __name__ == "__main__":
    main()
