"""A model compiled ahead of time, into a package: the same operators run, with the same numbers."""

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import qtorch
from qtorch.kernels.cpu import build, compiled_library, operators, variants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(compiled_library.library() is None, reason="nothing is built"),
]

KERNELS = {
    qtorch.int4_weight_only(group_size=32): "cpu_weight_only_mm",
    qtorch.int8_dynamic_activation_int4_weight(): "cpu_int8_mm",
}


def package_of(recipe, folder: Path):
    """A quantized model, and the path of its package."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).requires_grad_(False).eval()
    qtorch.quantize_(model, recipe)
    rows = torch.export.Dim("rows", min=2, max=1024)
    exported = torch.export.export(model, (torch.randn(5, 64),), dynamic_shapes=({0: rows},))
    return model, torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / "model.pt2"))


@pytest.mark.parametrize("recipe", KERNELS, ids=lambda recipe: recipe.name)
def test_package(recipe, tmp_path: Path):
    model, path = package_of(recipe, tmp_path)
    package = torch._inductor.aoti_load_package(path)
    for count in (2, 5, 40):
        x = torch.randn(count, 64)
        before = operators.calls()
        with variants.force("tile"), qtorch.kernels.record_kernels() as ran:  # not "float", which runs in Python
            y = package(x)
        assert operators.calls() - before == (2 if operators.attached() else 0)
        assert [name for name in ran if "." not in name] == [KERNELS[recipe]] * 2
        torch.testing.assert_close(y, model(x))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    """`run_package.cpp`, which links torch's libraries but not Python."""
    torch_folder = Path(torch.__file__).parent
    path = tmp_path_factory.mktemp("program") / "run_package"
    library, source = torch_folder / "lib", Path(__file__).with_name("run_package.cpp")
    command = [*build.find_compiler(), "-std=c++20", "-w", "-isystem", torch_folder / "include", source, "-o", path]
    link = [f"-L{library}", f"-Wl,-rpath,{library},--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    done = subprocess.run([*command, *link], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"torch's headers do not compile: {done.stderr[-500:]}")
    return path


@pytest.mark.skipif(not operators.attached(), reason="the operators are not built")
@pytest.mark.parametrize("recipe", KERNELS, ids=lambda recipe: recipe.name)
def test_package_without_python(recipe, program: Path, tmp_path: Path):
    _, path = package_of(recipe, tmp_path)
    package = torch._inductor.aoti_load_package(path)
    for count in (2, 40):
        x = torch.randn(count, 64)
        x.numpy().tofile(tmp_path / "x")
        library = qtorch.kernels.cpu_operators_library()
        command = [program, library, path, str(count), "64", tmp_path / "x", tmp_path / "y"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "2\n", "both layers"
        y = torch.from_file(str(tmp_path / "y"), size=count * 32, dtype=torch.float32).reshape(count, 32)
        assert torch.equal(y, package(x))
