"""Each page of docs/extending has one complete file. Saved and imported it does what the page says, and the tests over
all kernels, layouts, recipes and formats take what it registers by themselves."""

from pathlib import Path

import pytest
import torch

from tests.extending.pages import FOLDER, run_file, run_tests_with

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
        "tests/layouts",
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
    assert passed(found, "test_exact", "nibbles") >= 4
    assert len(found) > 100


@pytest.mark.slow
def test_recipe(tmp_path: Path) -> None:
    found = run_tests_with(
        "recipe",
        tmp_path,
        f"{HERE}/use_recipe.py",
        "tests/test_every_recipe.py",
        "tests/training/test_gemm.py",
        "tests/training/test_training_recipes.py",
        "-k=use_recipe or int6",
    )
    assert passed(found, "test_inference") == 3
    assert passed(found, "test_zero_row_stays_zero", "int8_dynamic_activation_int6_weight") == 1
    assert passed(found, "test_", "int6_weight_training") > 3
    assert passed(found, "test_the_error_against_float_is_bounded_on_both_sides", "int6_weight_training") == 1
    assert passed(found, "test_weights_train_and_everything_else_is_left", "int6_weight_training") == 1
    # Named as skipped or passed, none failed: `run_tests_with` has asserted that.
    assert len(found) > 20


@pytest.mark.slow
def test_number_format(tmp_path: Path) -> None:
    found = run_tests_with(
        "number_format",
        tmp_path,
        f"{HERE}/use_number_format.py",
        "tests/primitives/test_floatx.py",
        "tests/primitives/test_scale_rule.py",
        "tests/test_every_recipe.py",
        "-k=use_number_format or float7 or RootMeanSquareRule",
    )
    assert passed(found, "test_a_quantized_layer") == 2
    for test in ("test_every_code", "test_every_midpoint_goes_to_the_even_code", "test_it_saturates"):
        assert passed(found, test, "[float7_e3m3]") == 1
    assert passed(found, "test_a_range_is_fp32_of_the_scales_shape", "RootMeanSquareRule") == 15
    assert passed(found, "test_empty_tensors", "RootMeanSquareRule") == 3
    assert passed(found, "test_zero_row_stays_zero", "[float7_weight_only]") == 1


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("kernel", "runs my_float5_linear"),
        ("layout", "runs nibbles_weight_mm"),
        ("recipe", "loss of the converted model 0.0"),
        ("number_format", "SQNR "),
    ],
)
def test_the_file_runs_as_a_program(page: str, said: str, tmp_path: Path) -> None:
    if page == "kernel":
        pytest.importorskip("triton")
    assert said in run_file(page, tmp_path)


def test_every_page_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {"kernel", "layout", "recipe", "number_format"}
