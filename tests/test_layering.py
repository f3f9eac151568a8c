"""What may import what, and a few names that may appear in few places; read from the source, nothing is run."""

import ast
from collections.abc import Iterator
from pathlib import Path

import qtorch

ROOT = Path(qtorch.__file__).parent
TREES = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}

# Bottom up, one floor a line. A file stands on the floor that names it, or else the nearest folder that it is in. It
# imports from its own floor and from lower ones, and never in a circle. The face of a package (`__init__`) stands with
# the highest of its files. A new kernel, layout, recipe needs no entry.
FLOORS: list[list[str]] = [
    ["primitives"],
    ["primitives/layouts"],
    ["kernels"],
    ["dtypes"],
    ["model/explain", "model/install", "model/module_repr", "model/weight_kinds"],
    ["model/report", "model/targets"],
    ["checkpoint"],
    ["calibration/captures", "calibration/data", "calibration/statistics"],
    ["calibration/engine"],
    ["recipes/base"],
    ["model"],
    ["calibration/with_data"],
    ["quantize_api"],
    ["recipes"],
    ["checkpoint/formats"],
    ["calibration"],
    ["calibration/allocation", "calibration/compare"],
    ["checkpoint/streaming"],
    ["training/engine"],
    ["training/weights"],
    ["training"],
    ["kv_cache"],
    ["integrations"],
    ["cli"],
    ["__init__", "__main__"],
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}

LONGEST = 450
"""Lines of a file."""

LAYOUTS = Path("primitives/layouts")


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            yield path, node


def place(path: Path, node: ast.AST) -> str:
    return f"{path}:{getattr(node, 'lineno', 0)}"


def unit_of(path: Path) -> str:
    """The entry of FLOORS that a file or folder belongs to."""
    whole = path.parent if path.name == "__init__.py" and len(path.parts) > 1 else path.with_suffix("")
    names = [whole.as_posix(), *(parent.as_posix() for parent in path.parents)]
    if path.name == "__init__.py" and len(path.parts) > 1:
        inside = [name for name in FLOOR if f"{name}/".startswith(f"{names[0]}/")]
        if inside:
            return max(inside, key=FLOOR.__getitem__)
    return next((name for name in names if name in FLOOR), names[0])


def file_of(name: str) -> Path | None:
    """The file that an absolute name of this package is in."""
    parts = name.split(".")[1:]
    for end in range(len(parts), -1, -1):
        stem = Path(*parts[:end])
        for path in (stem.with_suffix(".py") if end else Path("__init__.py"), stem / "__init__.py"):
            if path in TREES:
                return path
    return None


def imported(path: Path, node: ast.AST) -> list[str]:
    """Absolute names of what an import statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = ["qtorch", *path.parts[:-1]]
    base = package[: len(package) - node.level + 1] if node.level else []
    module = ".".join([*base, *([node.module] if node.module else [])])
    return [f"{module}.{alias.name}" for alias in node.names]


def is_call_of(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in names


def arrows() -> Iterator[tuple[Path, Path, str]]:
    """(file, file that it imports from, where), imports of functions and for types included."""
    for path, node in nodes():
        for name in imported(path, node):
            if name.split(".")[0] == "qtorch" and (other := file_of(name)) not in (None, path):
                yield path, other, f"{place(path, node)} imports {name}"


def test_imports_point_down_without_circles() -> None:
    wrong = []
    for path, other, where in arrows():
        here, there = unit_of(path), unit_of(other)
        if FLOOR[there] > FLOOR[here]:
            wrong.append(where)
    assert not wrong
    below: dict[Path, set[Path]] = {path: set() for path in TREES}
    for path, other, _ in arrows():
        if other.name != "__init__.py":
            below[path].add(other)
    # What imports nothing that is left stands on the ground; take it away until nothing changes.
    left = set(below)
    while ground := {path for path in left if not below[path] & left}:
        left -= ground
    assert not left, f"in circles, or above one: {sorted(map(str, left))}"
    # A new module has to say where it stands in FLOORS, unless its folder does.
    assert not [str(path) for path in TREES if unit_of(path) not in FLOOR]
    assert not [name for name in FLOOR if not any(unit_of(path) == name for path in TREES)]
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in TREES}
    assert not {path: length for path, length in lengths.items() if length > LONGEST}


def test_the_check_resolves_relative_imports() -> None:
    """It would be easy for the checks above to see nothing."""
    found = {(str(path), str(other)) for path, other, _ in arrows()}
    assert ("primitives/layouts/base.py", "primitives/spec.py") in found
    assert ("quantize_api.py", "dtypes/__init__.py") in found
    assert ("kernels/linear/scaled.py", "kernels/ops/int8_grouped_mm.py") in found
    assert ("dtypes/__init__.py", "dtypes/ops.py") in found


FACTORIES = ("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "frombuffer", "full", "linspace")
FACTORIES += ("logspace", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros")
"""Of torch: their results have the default dtype and lie on the default device unless they are told others."""

FINE = {
    ("arange", "dtype"),  # of integers, as all here are: int64
    ("as_tensor", "dtype"),  # of arrays, which have one
    ("frombuffer", "device"),  # takes none
    ("randint", "dtype"),  # int64
    ("randperm", "dtype"),
}


def test_the_defaults_of_the_process_change_no_tensor() -> None:
    """Compiled code once wrote fp32 into memory of `torch.empty(m, 1)`, which is bf16 where that is the default."""
    wrong, seen = [], 0
    for path, node in nodes():
        if not is_call_of(node, *(f"torch.{name}" for name in FACTORIES)):
            continue
        seen += 1
        given, name = {keyword.arg for keyword in node.keywords}, node.func.attr
        wrong += [
            f"{place(path, node)}: torch.{name} without {missing}"
            for missing in ("dtype", "device")
            if not given & {missing, None} and (name, missing) not in FINE
        ]
        if (
            name == "arange"
            and "dtype" not in given
            and any(isinstance(a, ast.Constant) and isinstance(a.value, float) for a in node.args)
        ):
            wrong.append(f"{place(path, node)}: torch.arange of floats without dtype")
    wrong += [
        f"{place(path, node)} imports {name}: write it with torch. before it"
        for path, node in nodes()
        for name in imported(path, node)
        if name in {f"torch.{name}" for name in FACTORIES}
    ]
    assert not wrong
    assert seen > 100


# Files that compare addresses, or look at how they are aligned, and read nothing there.
COMPARED = {
    "calibration/captures.py", "checkpoint/save_folder.py", "dtypes/experts.py", "dtypes/parameter.py",
    "integrations/fusion/fused_model.py", "integrations/plain_state.py", "integrations/transformers/loading_plan.py",
    "kernels/cpu/weight.py", "kernels/cuda/triton/int8_scaled_mm.py", "kernels/cuda/triton/launch.py",
    "training/distillation.py", "training/optim/adam.py",
}  # fmt: skip


def test_where_names_may_stand() -> None:
    unsafe = {"pickle", "cloudpickle", "dill", "shelve", "joblib"}
    wrong = [
        f"{place(path, node)} imports {name}"
        for path, node in nodes()
        for name in imported(path, node)
        if name.partition(".")[0] in unsafe
    ]
    wrong += [
        place(path, node)
        for path, node in nodes()
        if isinstance(node, ast.keyword) and node.arg == "weights_only" and ast.unparse(node.value) != "True"
    ]
    assert not wrong
    # `json.loads` of what others wrote takes any depth, any number of values, and any time for a pipe.
    readers = ("json.load", "json.loads", "json.JSONDecoder", "treespec_loads")
    found = {path.as_posix() for path, node in nodes() if is_call_of(node, *readers)}
    assert found == {"primitives/files.py", "calibration/engine/streams.py"}
    assert not [place(path, node) for path, node in nodes() if "json.loads" in imported(path, node)]
    # Code that does has to be changed for every new layout.
    wrong = []
    for path, node in nodes():
        if path.parent == LAYOUTS:
            continue
        if is_call_of(node, "isinstance", "issubclass") and "Layout" in ast.unparse(node.args[1]):
            wrong.append(place(path, node))
        if isinstance(node, ast.Compare) and "type(" in ast.unparse(node) and "Layout" in ast.unparse(node):
            wrong.append(place(path, node))
    assert not wrong
    # A default has to be named somewhere, and __init__ exports it; every other mention would be a special case.
    allowed = {Path("dtypes/factories.py"), Path("dtypes/base.py")}
    wrong = [
        place(path, node)
        for path, node in nodes()
        if path not in allowed
        and path.parent != LAYOUTS
        and path.name != "__init__.py"
        and "PlainLayout" in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
    ]
    assert not wrong
    # `kernels.cpu.memory.address` looks where the memory of a tensor is before compiled code does.
    asks = {
        path.as_posix()
        for path, node in nodes()
        if isinstance(node, ast.Attribute) and node.attr in ("data_ptr", "const_data_ptr")
    }
    assert asks == {"kernels/cpu/memory.py", *COMPARED}
