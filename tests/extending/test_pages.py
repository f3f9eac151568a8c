"""Each page of docs/extending has one complete file. Saved and imported it does what the page says, and the tests over
all kernels, layouts, recipes and formats take what it registers by themselves."""

from pathlib import Path

import pytest
import torch

from tests.extending.pages import FOLDER, run_file, run_tests_with
from tests.fast_part import slow_but

ON_CUDA = "my_float5_linear" if torch.cuda.is_available() else "my_float5_linear_on_cuda"

# page -> test files, the words that choose among their tests, and how many cases of a test whose id has a word pass.
WITHOUT_CUDA = {("test_against_the_reference", "my_float5_linear"): 6, ("test_every_kernel", "my_float5_linear"): 2}
if torch.cuda.is_available():
    WITHOUT_CUDA = {}
RUNS: dict[str, tuple[list[str], str, dict[tuple[str, str], int]]] = {
    "kernel": (
        ["kernels/test_every_kernel.py", "kernels/triton/test_linear.py", "attack/test_non_finite.py"],
        "my_float5",
        {("test_a_quantized_layer_runs_it", ""): 6, ("test_against_the_reference", ON_CUDA): 3} | WITHOUT_CUDA,
    ),
    "layout": (
        ["layouts", "dtypes", "kernels/test_every_kernel.py"],
        "nibbles",
        {
            ("test_a_quantized_layer_runs_its_kernel", ""): 12,
            ("test_unpack_is_the_inverse_of_pack", "[nibbles]"): 1,
            ("test_layouts_are_values", "[nibbles]"): 1,
            ("test_against_the_reference", "[nibbles_weight_mm-"): 3,
        },
    ),
    "recipe": (
        ["test_every_recipe.py", "training/test_gemm.py", "training/test_training_recipes.py"],
        "int6",
        {
            ("test_inference", ""): 3,
            ("test_zero_row_stays_zero", "int8_dynamic_activation_int6_weight"): 1,
            ("test_the_error_is_bounded_and_autocast", "int6_weight_training"): 1,
            ("test_weights_train_and_a_model_learns", "int6_weight_training"): 1,
        },
    ),
    "number_format": (
        ["primitives/test_floatx.py", "primitives/test_scale_rule.py", "test_every_recipe.py"],
        "float7 or RootMeanSquareRule",
        {
            ("test_a_quantized_layer", ""): 2,
            ("test_every_code_and_every_midpoint", "[float7_e3m3]"): 1,
            ("test_a_range_is_fp32_of_the_scales_shape", "RootMeanSquareRule"): 15,
            ("test_empty_tensors", "RootMeanSquareRule"): 3,
            ("test_zero_row_stays_zero", "[float7_weight_only]"): 1,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNS)
def test_with_the_tests_over_all_of_its_kind(page: str, tmp_path: Path) -> None:
    """Each is skipped or passes, none fails: `run_tests_with` asserts that."""
    if page == "kernel":
        pytest.importorskip("triton")
    files, words, wanted = RUNS[page]
    paths = [f"tests/{file}" for file in files]
    found = run_tests_with(page, tmp_path, f"tests/extending/use_{page}.py", *paths, f"-k=use_{page} or {words}")
    passed = [name for name, outcome in found.items() if outcome == "passed"]
    counts = {(test, word): sum(f"::{test}" in name and word in name for name in passed) for test, word in wanted}
    assert counts == wanted
    assert len(found) > {"layout": 100, "recipe": 20}.get(page, 0)
    if page == "layout":
        # The files of tests/dtypes that run over schemes, and every scheme that the layout takes.
        schemes = ("uint4 group", "float4 group, float8 scales", "int4 group, int8 token")
        files = {name.partition("::")[0].removeprefix("tests.dtypes.test_") for name in found if ".dtypes." in name}
        assert {"affine_quantized_tensor", "base", "embedding"} <= files
        assert {"functions", "modules", "ops"} <= files
        for scheme in schemes:
            assert len({name.partition("::")[0] for name in found if f"{scheme}, nibbles" in name}) >= 8, scheme


SAID = {
    "kernel": "runs my_float5_linear", "layout": "runs nibbles_weight_mm", "recipe": "loss of the converted model 0.0",
    "number_format": "SQNR ",
}  # fmt: skip


@pytest.mark.parametrize("page", slow_but(["recipe"], SAID))
def test_the_file_runs_as_a_program(page: str, tmp_path: Path) -> None:
    if page == "kernel":
        pytest.importorskip("triton")
    assert SAID[page] in run_file(page, tmp_path)


def test_every_page_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == RUNS.keys() == SAID.keys()
