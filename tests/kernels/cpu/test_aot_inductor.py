"""A model compiled ahead of time, into a package: the same operators run, with the same numbers."""

from pathlib import Path

import pytest
import torch
from torch import nn

import qtorch
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import build, compiled_library

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(compiled_library.library() is None, reason="nothing is built"),
]

KERNELS = {
    qtorch.int4_weight_only(group_size=32): "cpu_weight_only_mm",
    qtorch.int8_dynamic_activation_int4_weight(): "cpu_int8_mm",
}


@pytest.mark.parametrize("recipe", KERNELS, ids=lambda recipe: recipe.name)
def test_package(recipe, tmp_path: Path):
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).requires_grad_(False).eval()
    qtorch.quantize_(model, recipe)
    rows = torch.export.Dim("rows", min=2, max=1024)
    exported = torch.export.export(model, (torch.randn(5, 64),), dynamic_shapes=({0: rows},))
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
    package = torch._inductor.aoti_load_package(path)
    for count in (2, 5, 40):
        x = torch.randn(count, 64)
        with record_kernels() as ran:
            y = package(x)
        assert [name for name in ran if "." not in name] == [KERNELS[recipe]] * 2
        torch.testing.assert_close(y, model(x))
