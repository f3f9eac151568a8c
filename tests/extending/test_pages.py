"""Each page of docs/extending has one complete file. Saved and imported it does what the page says, and the tests over
all kernels, layouts, recipes and formats take what it registers by themselves."""

from pathlib import Path

import pytest
import torch

from tests.extending.pages import run_tests_with

HERE = "tests/extending"
HAS_GPU = torch.cuda.is_available()


def passed(found: dict[str, str], test: str, word: str = "") -> int:
    """How many cases of `test` whose id has `word` have passed."""
    return sum(f"::{test}" in name and word in name and outcome == "passed" for name, outcome in found.items())


def test_kernel(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    found = run_tests_with(
        "kernel",
        tmp_path,
        f"{HERE}/use_kernel.py",
        "tests/kernels/test_every_kernel.py",
        "tests/kernels/triton/test_linear.py",
        "tests/attack/test_non_finite.py",
        "-k=use_kernel or my_float5",
    )
    assert passed(found, "test_a_quantized_layer_runs_it") == 6
    on_cuda = "my_float5_linear" if HAS_GPU else "my_float5_linear_on_cuda"
    assert passed(found, "test_against_the_reference", on_cuda) == 3
    if not HAS_GPU:
        assert passed(found, "test_against_the_reference", "my_float5_linear") == 6
        assert passed(found, "test_every_kernel", "my_float5_linear") == 2


@pytest.mark.slow
def test_layout(tmp_path: Path) -> None:
    found = run_tests_with(
        "layout",
        tmp_path,
        f"{HERE}/use_layout.py",
        "tests/dtypes",
        "tests/kernels/test_every_kernel.py",
        "-k=use_layout or nibbles",
    )
    assert passed(found, "test_a_quantized_layer_runs_its_kernel") == 12
    assert passed(found, "test_unpack_is_the_inverse_of_pack", "[nibbles]") == 1
    assert passed(found, "test_layouts_are_values", "[nibbles]") == 1
    assert passed(found, "test_against_the_reference", "[nibbles_weight_mm-") == 3
    # Every file of tests/dtypes that runs over schemes, and every scheme that the layout takes.
    for file in ("affine_quantized_tensor", "base", "compile", "embedding", "functions", "gradients", "modules", "ops"):
        ids = [name for name in found if name.startswith(f"tests.dtypes.test_{file}::")]
        for scheme in ("uint4 group", "float4 group, float8 scales", "int4 group, int8 token"):
            assert any(f"{scheme}, nibbles" in name for name in ids), (file, scheme)
    assert passed(found, "test_exact", "nibbles") > 100
    assert len(found) > 400
