"""The schemes that these tests run over, a new layout among them by itself, and a tensor of each."""

import contextlib
from dataclasses import replace

import torch

import qtorch
from qtorch import CodebookSpec, LinearSpec, PackedLayout, PerBlock, PerGroup, PerTensor, QuantSpec, ZeroPointDomain

ASYMMETRIC = qtorch.MappingType.ASYMMETRIC
INT8 = QuantSpec("int8", quant_min=-127)
TOKEN = QuantSpec("int8", qtorch.PerToken(), quant_min=-127)
FLOAT8 = QuantSpec("float8_e4m3fn", zero_point_domain=ZeroPointDomain.NONE)
FLOAT8_SCALES = QuantSpec("float8_e4m3fn", PerTensor(), zero_point_domain=ZeroPointDomain.NONE)
FLOAT4 = QuantSpec("float4_e2m1", PerGroup(16), zero_point_domain=ZeroPointDomain.NONE, scale_spec=FLOAT8_SCALES)
UINT4 = QuantSpec("uint4", PerGroup(32), ASYMMETRIC)

SPECS = {
    "int8 row": LinearSpec(INT8),
    "int8 tensor": LinearSpec(QuantSpec("int8", PerTensor())),
    "int8 block": LinearSpec(QuantSpec("int8", PerBlock((8, 16)))),
    "uint4 group": LinearSpec(UINT4),
    "uint4 group, real zero": LinearSpec(
        QuantSpec("uint4", PerGroup(32), ASYMMETRIC, ZeroPointDomain.FLOAT, preserve_zero=False)
    ),
    "float8 row": LinearSpec(FLOAT8),
    "float4 group, float8 scales": LinearSpec(FLOAT4),
    "float4 group, float8 scales, packed": LinearSpec(FLOAT4, layout=PackedLayout()),
    "uint4 group, packed": LinearSpec(UINT4, layout=PackedLayout()),
    "uint4 group, int8 scales": LinearSpec(replace(UINT4, scale_spec=INT8.with_granularity(PerGroup(256)))),
    "int3 group, packed": LinearSpec(QuantSpec("int3", PerGroup(16)), layout=PackedLayout()),
    "int8 row, int8 token": LinearSpec(INT8, TOKEN),
    "int4 group, int8 token": LinearSpec(QuantSpec("int4", PerGroup(32)), TOKEN),
    "int4 group, int8 token, packed": LinearSpec(QuantSpec("int4", PerGroup(32)), TOKEN, layout=PackedLayout()),
    "int4 group, int8 scales, int8 token, packed": LinearSpec(
        QuantSpec("int4", PerGroup(32), scale_spec=INT8.with_granularity(PerGroup(256))), TOKEN, layout=PackedLayout()
    ),
    "int8 row, 2:4": LinearSpec(INT8, layout=qtorch.SemiSparseLayout()),
    "int8 row, int8 token, 2:4": LinearSpec(INT8, TOKEN, layout=qtorch.SemiSparseLayout()),
    "float8 row, 2:4": LinearSpec(FLOAT8, layout=qtorch.SemiSparseLayout()),
    "int8 row, static int8": LinearSpec(INT8, QuantSpec("int8", PerTensor()), static=True),
}

SQNR = {
    "int8 row": (40, 50), "int8 tensor": (36, 46), "int8 block": (41, 49), "uint4 group": (18, 25),
    "float8 row": (28, 36), "float4 group": (18, 24), "int3 group": (11, 18), "int4 group": (17, 24),
}  # fmt: skip
"""In dB, what normal numbers keep by the first words of a name above: at least, at most."""


def in_other_layouts() -> dict[str, LinearSpec]:
    """Those above without a layout, in each registered layout that none of them has."""
    # Tiles and blocks have tests of their own: they take few shapes.
    known = {
        "plain", "tensor_core_tiled", "block_sparse", *(spec.layout.name for spec in SPECS.values() if spec.layout),
    }  # fmt: skip
    found = {}
    for layout in [cls() for name, cls in qtorch.primitives.layouts.LAYOUTS.items() if name not in known]:
        for name, spec in SPECS.items():
            if spec.layout is None:
                with contextlib.suppress(ValueError):
                    layout.check(qtorch.primitives.spec.Scheme(replace(spec, layout=layout), (32, 64), torch.float32))
                    found[f"{name}, {layout.name}"] = replace(spec, layout=layout)
    return found


OTHER_LAYOUTS = in_other_layouts()
SPECS |= OTHER_LAYOUTS
LUTS = {
    "nf4": qtorch.dtypes.codebook_tensor.nf4_spec(),
    "nf4 single": qtorch.dtypes.codebook_tensor.nf4_spec(16, None),
    "3 bits group": CodebookSpec("uint3", PerGroup(32)),
    "2 bits row": CodebookSpec("uint2", qtorch.PerRow()),
    "4 bits block": CodebookSpec("uint4", PerBlock((8, 64))),
    "8 bits block": CodebookSpec("uint8", PerBlock((8, -1))),
}
"""Look-up tables, which most of these tests run over too."""
SPARSE = [name for name, spec in SPECS.items() if spec.layout is not None and not spec.layout.any_codes]
PACKED = [name for name, spec in SPECS.items() if spec.layout == PackedLayout()]
WEIGHT_ONLY = [name for name, spec in SPECS.items() if spec.activation is None]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers, pruned if the layout of the scheme `SPECS[name]` takes no others."""
    normal = torch.randn(shape or (32, 64), dtype=dtype)
    return qtorch.primitives.prune_2_4(normal) if name in SPARSE else normal


def quantized(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> qtorch.dtypes.QuantizedTensor:
    """`values` in the scheme `SPECS[name]` or `LUTS[name]`; activations of a static one lie within about 4."""
    if name in LUTS:
        return qtorch.LUTQuantizedTensor.from_float(values(name, *shape, dtype=dtype), LUTS[name])
    spec = SPECS[name]
    act_scale = torch.full((1, 1), 4 / 127) if spec.static else None
    return qtorch.AffineQuantizedTensor.from_float(values(name, *shape, dtype=dtype), spec, act_scale)
