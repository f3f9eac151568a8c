"""Run by the Python of an environment in which a wheel of qtorch is installed (`tools/wheel.py`): quantize a model, and
fail unless compiled kernels of the wheel run, for each of its instruction sets that this machine has."""

import copy

import torch

import qtorch
from qtorch.kernels import record_kernels
from qtorch.kernels.cpu import build, compiled_library

RECIPES = {
    "cpu_weight_only_mm": (qtorch.int8_weight_only(), qtorch.int4_weight_only(group_size=32)),
    "cpu_int8_mm": (
        qtorch.int8_dynamic_activation_int8_weight(),
        qtorch.int8_dynamic_activation_int4_weight(group_size=32),
    ),
}
LOWEST_COSINE = 0.98

if build.find_compiler():
    raise SystemExit(f"there is a compiler, {build.find_compiler()}: this shows nothing")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)).eval()
x = torch.randn(16, 256)
wanted = model(x)

used = compiled_library.library()
if used is None or build.HERE not in used.path.parents:
    raise SystemExit(f"the kernels in use are not those of the wheel: {compiled_library.missing() or used.path}")
there = [name for name in build.instruction_sets() if build.library_path(name).exists()]
sets = [name for name in there if compiled_library.runs_here(name)]
for name in sets:
    with compiled_library.use(name):
        for kernel, recipes in RECIPES.items():
            for recipe in recipes:
                quantized = copy.deepcopy(model)
                report = qtorch.quantize_(quantized, recipe)
                if str(report).count(kernel) < 2:
                    raise SystemExit(f"{name}: {kernel} is not what runs:\n{report}\n{qtorch.explain(quantized)}")
                with record_kernels() as ran:
                    y = quantized(x)
                cosine = torch.cosine_similarity(y.flatten(), wanted.flatten(), dim=0).item()
                if not any(way.startswith(f"{kernel}.{name}.") for way in ran) or not LOWEST_COSINE < cosine < 1:
                    raise SystemExit(f"{name}: {ran} ran, cosine {cosine}")

print(f"{build.HERE.parents[2]}: with torch {torch.__version__}, compiled kernels run for {', '.join(sets)}")
