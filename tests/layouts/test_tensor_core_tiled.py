"""Codes in the tiles of tensor cores: the layout, and the packing of each device."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import qtorch
from qtorch import AffineQuantizedTensor, LinearSpec, PerGroup, PlainLayout, QuantSpec, TensorCoreTiledLayout
from qtorch.primitives import ZeroPointDomain
from qtorch.primitives.layouts import tensor_core_tiled
from qtorch.primitives.layouts.tensor_core_tiled import CpuPacking, pack_cpu, pack_cuda, unpack_cpu, unpack_cuda
from tests.dtypes.specs import ASYMMETRIC
from tests.movement.holding import through_file

TILED = TensorCoreTiledLayout()


def spec(group: int = 32, domain: ZeroPointDomain = ZeroPointDomain.FLOAT, dtype: str = "uint4") -> QuantSpec:
    preserve_zero = domain is not ZeroPointDomain.FLOAT
    return QuantSpec(dtype, PerGroup(group), ASYMMETRIC, domain, preserve_zero=preserve_zero)


def tiled(n: int = 48, k: int = 96, group: int = 32, dtype: torch.dtype = torch.float32) -> AffineQuantizedTensor:
    return AffineQuantizedTensor.from_float(torch.randn(n, k, dtype=dtype), LinearSpec(spec(group), layout=TILED))


def same_plain(a: AffineQuantizedTensor, b: AffineQuantizedTensor) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a.plain(), b.plain()))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    n=st.integers(0, 150), groups=st.integers(1, 5), group=st.sampled_from([32, 64, 128, 256]),
    inner_k_tiles=st.sampled_from([2, 4, 8]), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_a_bijection(n: int, groups: int, group: int, inner_k_tiles: int, dtype: torch.dtype) -> None:
    w = AffineQuantizedTensor.from_float(torch.randn(n, groups * group, dtype=dtype), spec(group))
    packed = w.to_layout(TensorCoreTiledLayout(inner_k_tiles))
    assert packed.shape == w.shape
    assert same_plain(packed, w)
    assert packed.scale_and_zero.shape == (groups, -(-n // 64) * 64, 2)


def test_bytes_views_and_the_cuda_format() -> None:
    w = tiled(64, 256, 64, torch.bfloat16)
    assert w.nbytes == 64 * 256 // 2 + 64 * 4 * 2 * 2
    w = tiled(128, 128)
    float_weight = w.dequantize()
    for view, layout in [(lambda w: w[5:70], TILED), (lambda w: w[:, 32:96], TILED), (lambda w: w.t(), PlainLayout())]:
        assert view(w).scheme.layout == layout
        assert torch.equal(view(w).dequantize(), view(float_weight))
    meta = w.to("meta")
    assert torch.nn.functional.linear(torch.empty(3, 128, device="meta"), meta).shape == (3, 128)
    # The packing depends on the processor; the file may be read on another one.
    w = torch.nn.Parameter(tiled(dtype=torch.bfloat16), requires_grad=False)
    assert set(w.__reduce_ex__(2)[1][1]) == {"codes", "scale", "zero_point"}
    again = through_file({"w": w})["w"]
    assert again.scheme == w.scheme
    assert torch.equal(again.qdata, w.qdata)
    assert torch.equal(again.scale_and_zero, w.scale_and_zero)
    # Lane 5 holds row 1, columns 2 and 3 of each run of 8: the even ones in the low nibbles, the odd ones above.
    codes = torch.zeros(8, 32, dtype=torch.uint8)
    codes[1, [2, 10, 18, 26]] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    codes[1, [3, 11, 19, 27]] = torch.tensor([5, 6, 7, 8], dtype=torch.uint8)
    packed = pack_cuda(codes, 2)
    assert packed[0, 0, 5, 0].item() == 0x87654321 - 2**32
    assert packed.count_nonzero() == 1


def test_another_packing_is_made_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second device here: pretend that fp16 tensors are on one whose packing is CUDA's."""
    w = tiled()
    cuda = {"half": TILED.inner_k_tiles}
    monkeypatch.setattr(TensorCoreTiledLayout, "packing", lambda self, device: cuda.pop("half", None))
    packed = []
    monkeypatch.setattr(tensor_core_tiled, "pack_cpu", lambda codes, _: packed.append(codes) or codes)
    w.to("cpu", copy=True)
    assert len(packed) == 1
    assert torch.equal(packed[0][:48], w.to_layout(PlainLayout()).qdata)


def test_what_it_asks_for() -> None:
    weight = torch.randn(8, 96)
    for wrong, text in [
        (spec(domain=ZeroPointDomain.INT), "zero points of the FLOAT domain, the weight has zero_point_domain INT"),
        (spec(dtype="uint3"), "takes uint4 codes from 0 to 15, the weight has uint3"),
        (spec(16), r"takes groups of 32, 64, 128 or 256 along a row, the weight has blocks of \(1, 16\)"),
    ]:
        with pytest.raises(ValueError, match=text):
            AffineQuantizedTensor.from_float(weight, LinearSpec(wrong, layout=TILED))
    with pytest.raises(ValueError, match=r"takes a matrix, the weight has shape \(2, 8, 96\)"):
        AffineQuantizedTensor.from_float(torch.randn(2, 8, 96), LinearSpec(spec(), layout=TILED))
    with pytest.raises(ValueError, match="inner_k_tiles is 2, 4 or 8, got 3"):
        TensorCoreTiledLayout(3)
    codes, scale, zero_point = AffineQuantizedTensor.from_float(weight, spec()).plain()
    with pytest.raises(ValueError, match=r"in one dtype, got torch\.float32 and torch\.float16"):
        AffineQuantizedTensor.from_plain(
            codes, scale, zero_point.half(), LinearSpec(spec(), layout=TILED), torch.float32
        )


PACKINGS = [CpuPacking(block, halves) for block in (64, 32, 16) for halves in (True, False)]


def random_codes(n: int, k: int) -> torch.Tensor:
    return torch.randint(0, 16, (n, k), dtype=torch.uint8)


@pytest.mark.parametrize(("n", "k"), [(64, 32), (128, 96), (320, 64), (0, 32)])
def test_cpu(n: int, k: int) -> None:
    codes = random_codes(n, k)
    for packing in PACKINGS:
        assert torch.equal(unpack_cpu(pack_cpu(codes, packing), packing), codes)
        assert torch.equal(unpack_cpu(pack_cpu(codes, packing)[64:128], packing), codes[64:128]), "whole blocks"
    if n:
        theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        assert torch.equal(pack_cpu(codes, qtorch.primitives.layouts.tensor_core_tiled.cpu_packing()), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx512", "avx2", "default"])
def test_the_packing_of_every_instruction_set_is_known(capability: str) -> None:
    """torch chooses it when it starts."""
    if capability == "avx512" and not qtorch.kernels.cpu.compiled_library.runs_here("avx512"):
        pytest.skip("no avx512 here")
    code = "from qtorch.primitives.layouts.tensor_core_tiled import cpu_packing; print(*cpu_packing())"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert tuple(run.stdout.split()) in {(str(p.block), str(p.halves)) for p in PACKINGS}


@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(8, 128), (24, 256), (0, 128)])
def test_cuda_format(inner_k_tiles: int, n: int, k: int) -> None:
    codes = random_codes(n, k)
    packed = pack_cuda(codes, inner_k_tiles)
    assert packed.dtype == torch.int32
    assert packed.shape == (n // 8, k // (16 * inner_k_tiles), 32, inner_k_tiles // 2)
    assert torch.equal(unpack_cuda(packed), codes)


@pytest.mark.gpu
@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
def test_cuda(inner_k_tiles: int) -> None:
    codes = random_codes(24, 256).cuda()
    bytes_of_two = codes[:, ::2] << 4 | codes[:, 1::2]
    theirs = torch.ops.aten._convert_weight_to_int4pack(bytes_of_two, inner_k_tiles)
    assert torch.equal(pack_cuda(codes, inner_k_tiles), theirs)
    assert torch.equal(unpack_cuda(theirs), codes)
    layout = TensorCoreTiledLayout(inner_k_tiles)
    w = AffineQuantizedTensor.from_float(torch.randn(45, 160).bfloat16(), LinearSpec(spec(), layout=layout))
    there = w.cuda()
    assert there.qdata.dtype == torch.int32
    assert same_plain(there.cpu(), w)
    assert torch.equal(there.dequantize().cpu(), w.dequantize())
