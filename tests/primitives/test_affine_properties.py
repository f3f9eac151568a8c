"""Affine quantization: properties of the round trip, and stochastic rounding."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtorch.primitives import Rounding, ZeroPointDomain, dequantize_affine, qdtype, quantize_affine

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)


@PROPERTY
@given(
    code=st.sampled_from(["int2", "int4", "uint4", "int8", "uint8", "float8_e4m3fn"]),
    scale=st.floats(2**-60, 2**60, width=32),
    zero_point=st.integers(0, 255),
    domain=st.sampled_from(ZeroPointDomain),
)
def test_quantize_undoes_dequantize(code: str, scale: float, zero_point: int, domain: ZeroPointDomain) -> None:
    kind = qdtype(code)
    span = int(kind.quant_max - kind.quant_min) + 1
    if kind.is_floating_point:
        codes = torch.linspace(-448, 448, 999).to(kind.storage).reshape(1, -1)
        domain = ZeroPointDomain.NONE
    else:
        codes = torch.arange(kind.quant_min, kind.quant_max + 1).to(kind.storage).reshape(1, -1)
    s = torch.tensor([[scale]])
    z = torch.tensor([[kind.quant_min + zero_point % span]])
    if domain.adds_zero_point:
        z = z * s
    block = tuple(codes.shape)
    real = dequantize_affine(codes, block, s, z, code, zero_point_domain=domain)
    again = quantize_affine(real, block, s, z, code, zero_point_domain=domain)
    assert torch.equal(again.float(), codes.float())


@PROPERTY
@given(
    x=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=20),
    scale=st.floats(2**-10, 1024, width=32),
    zero_point=st.integers(-8, 7),
    domain=st.sampled_from(ZeroPointDomain),
)
def test_quantize_is_monotonic(x: list[float], scale: float, zero_point: int, domain: ZeroPointDomain) -> None:
    s, z = torch.tensor([scale]), torch.tensor([zero_point])
    ordered = torch.tensor(x).sort().values
    codes = quantize_affine(ordered, (len(x),), s, z, "int4", zero_point_domain=domain)
    assert (codes.diff() >= 0).all()
    real = dequantize_affine(codes, (len(x),), s, z, "int4", zero_point_domain=domain)
    assert (real.diff() >= 0).all()


def test_stochastic_rounding_is_seeded_and_unbiased() -> None:
    x = torch.full((200, 500), 0.3)
    scale = torch.ones(200, 1)
    codes = [
        quantize_affine(
            x,
            (1, 500),
            scale,
            None,
            "int4",
            rounding=Rounding.STOCHASTIC,
            generator=torch.Generator().manual_seed(seed),
        )
        for seed in (0, 0, 1)
    ]
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])
    assert set(codes[0].unique().tolist()) == {0, 1}
    assert abs(codes[0].double().mean().item() - 0.3) < 4 * (0.3 * 0.7 / x.numel()) ** 0.5
