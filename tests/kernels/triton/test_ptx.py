"""What the kernels become on GPUs that need not be there: compiled ahead of time for sm_80 and sm_90."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qtorch

pytestmark = pytest.mark.slow

WGMMA_INT8 = "wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8"
WGMMA = "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype}"
MMA_INT8 = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"
MMA_BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"

# kernel: instruction of the tensor cores that it must have been given
INSTRUCTIONS = {
    "int8 sm_90": WGMMA_INT8.format(n=128),
    "int8 sm_90 tma": WGMMA_INT8.format(n=128),
    "int8 sm_80": MMA_INT8,
    "int4 weight sm_90": WGMMA.format(n=16, dtype="bf16"),
    "int4 weight fp16 sm_90": WGMMA.format(n=16, dtype="f16"),
    "int4 weight large sm_90": WGMMA.format(n=128, dtype="bf16"),
    "int8 weight large sm_90": WGMMA.format(n=128, dtype="bf16"),
    "int4 weight sm_80": MMA_BF16,
    "int4 weight gathered sm_90": WGMMA.format(n=16, dtype="bf16"),
    "int8 weight sm_90": WGMMA.format(n=16, dtype="bf16"),
    "int8 weight sm_80": MMA_BF16,
    "int8 weight fp16 sm_90": WGMMA.format(n=16, dtype="f16"),
    "int3 weight sm_90": WGMMA.format(n=16, dtype="bf16"),
    "int4 rows sm_90": MMA_BF16,
    "int8 rows sm_80": MMA_BF16,
    "table large sm_90": WGMMA.format(n=128, dtype="bf16"),
    "float8 weight sm_90": WGMMA.format(n=16, dtype="bf16"),
    "table rows sm_80": MMA_BF16,
    "int4 grouped sm_90": WGMMA_INT8.format(n=16),
    "int8 grouped sm_90": WGMMA_INT8.format(n=128),
    "int4 grouped sm_80": MMA_INT8,
    "int8 tiles sm_90": WGMMA_INT8.format(n=128),
    "float8 tiles sm_90": "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3",
    "int8 tiles sm_80": MMA_INT8,
}


def compile_table(table, cache):
    """What `compile_launches` prints, run in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.kernels.triton.compile_launches", table]
    root = Path(qtorch.__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {name: about["failed"] for name, about in found.items() if "failed" in about} == {}
    # No product is under way at the end of a step: the next one may overwrite registers that it reads.
    waits = {
        name: set(re.findall(r"wait_group\S* (\d+)", " ".join(about["instructions"]))) for name, about in found.items()
    }
    assert {name: found for name, found in waits.items() if not found <= {"0"}} == {}
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Of every typical launch: its instructions and its shared memory."""
    return compile_table("TYPICAL", tmp_path_factory.mktemp("triton"))


def test_instructions_of_every_kernel(compiled):
    """Fits the shared memory of its GPU, adds nothing in an order left to chance, computes nothing in fp64."""
    for name, result in compiled.items():
        assert result["target"] == (90 if "sm_90" in name else 80), name
        assert result["shared"] <= (227 if "sm_90" in name else 163) * 1024, name
        assert not [i for i in result["instructions"] if i.startswith(("atom", "red", "cvt.f64"))], name
    assert [name for name, wanted in INSTRUCTIONS.items() if wanted not in compiled[name]["instructions"]] == []
    # Two codes an instruction: 64 x 64 bytes of a tile, 128 threads, 16 pairs of bytes, low and high.
    assert compiled["int4 weight sm_90"]["instructions"].count("lop3.b32") >= 32
    assert compiled["int4 weight sm_80"]["instructions"].count("lop3.b32") >= 32
    # 32 x 128 bytes of a tile, 32 threads, 128 bytes each.
    assert compiled["int4 rows sm_90"]["instructions"].count("lop3.b32") >= 128
    # cp.async, or the copy engine; and wide loads where there are no tiles.
    assert any(i.startswith("cp.async.cg") for i in compiled["int8 sm_90"]["instructions"])
    assert any(i.startswith("cp.async.bulk.tensor.2d") for i in compiled["int8 sm_90 tma"]["instructions"])
    assert not any(i.startswith("cp.async.c") for i in compiled["int8 sm_90 tma"]["instructions"])
    for name in ("int4 weight sm_90", "int4 rows sm_90", "int8 weight sm_90", "int4 grouped sm_90"):
        assert any(i.startswith("cp.async.c") for i in compiled[name]["instructions"]), name
    assert any(i.startswith("ld.global.v4") for i in compiled["quantize int8 sm_90"]["instructions"])


def test_every_launch_compiles(tmp_path):
    """With the arguments that launchers give, specialized as a launch does, also for sizes of 1 and odd ones."""
    assert len(compile_table("EVERY", tmp_path)) > 100
