"""The packings of torch's tinygemm kernels: equal to what torch makes, and undone exactly."""

import os
import subprocess
import sys

import pytest
import torch

from qtorch.kernels.cpu.compiled_library import runs_here
from qtorch.primitives.layouts.tensor_core_tiled import (
    CpuPacking,
    cpu_packing,
    pack_cpu,
    pack_cuda,
    unpack_cpu,
    unpack_cuda,
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
        assert torch.equal(pack_cpu(codes, cpu_packing()), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["avx512", "avx2", "default"])
def test_the_packing_of_every_instruction_set_is_known(capability: str) -> None:
    """torch chooses it when it starts."""
    if capability == "avx512" and not runs_here("avx512"):
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


def test_cuda_format_written_out() -> None:
    """Lane 5 holds row 1, columns 2 and 3 of each run of 8: the even ones in the low nibbles, the odd ones above."""
    codes = torch.zeros(8, 32, dtype=torch.uint8)
    codes[1, [2, 10, 18, 26]] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    codes[1, [3, 11, 19, 27]] = torch.tensor([5, 6, 7, 8], dtype=torch.uint8)
    packed = pack_cuda(codes, 2)
    assert packed[0, 0, 5, 0].item() == 0x87654321 - 2**32
    assert packed.count_nonzero() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("inner_k_tiles", [2, 4, 8])
def test_cuda(inner_k_tiles: int) -> None:
    codes = random_codes(24, 256).cuda()
    bytes_of_two = codes[:, ::2] << 4 | codes[:, 1::2]
    theirs = torch.ops.aten._convert_weight_to_int4pack(bytes_of_two, inner_k_tiles)
    assert torch.equal(pack_cuda(codes, inner_k_tiles), theirs)
    assert torch.equal(unpack_cuda(theirs), codes)
