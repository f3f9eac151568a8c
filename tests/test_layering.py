"""What may import what, and a few names that may appear in few places; read from the source, nothing is run."""

import ast
from collections.abc import Iterator
from pathlib import Path

import qtorch

ROOT = Path(qtorch.__file__).parent
TREES = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}

# Bottom up; a module or package imports only from those of lower rank. A package's own files import each other freely.
RANK = {
    "config": 0,
    "install": 0,
    "model_argument": 0,
    "prepared_module": 0,
    "primitives": 1,
    "kernels": 2,
    "dtypes": 3,
    "module_repr": 4,
    "explain": 5,
    "model_size": 5,
    "report": 5,
    "targets": 5,
    "checkpoint": 5,
    "recipe": 6,
    "quantize_api": 7,
    "recipes": 8,
    "training": 9,
    "__init__": 99,
}

LAYOUTS = Path("dtypes/layouts")


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            yield path, node


def place(path: Path, node: ast.AST) -> str:
    return f"{path}:{getattr(node, 'lineno', 0)}"


def unit_of(path: Path) -> str:
    """The top-level module or package that a file belongs to."""
    return path.parts[0].removesuffix(".py")


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


def test_every_file_has_a_rank() -> None:
    """A new module at the top of the package has to say where it stands: in RANK."""
    assert {unit_of(path) for path in TREES} == set(RANK)


def test_imports_point_down() -> None:
    wrong = []
    for path, node in nodes():
        unit = unit_of(path)
        for name in imported(path, node):
            parts = name.split(".")
            if parts[0] == "qtorch":
                other = parts[1] if len(parts) > 1 and parts[1] in RANK else "__init__"
                if other != unit and RANK[other] >= RANK[unit]:
                    wrong.append(f"{place(path, node)} imports {name}")
    assert not wrong


def test_the_check_resolves_relative_imports() -> None:
    """It would be easy for the check above to see nothing."""
    found = {(str(path), name) for path, node in nodes() for name in imported(path, node)}
    assert ("dtypes/layouts/base.py", "qtorch.primitives.scheme.Scheme") in found
    assert ("quantize_api.py", "qtorch.dtypes.QuantizedTensor") in found
    assert ("kernels/int8_scaled_mm.py", "qtorch.kernels.ops.int_matmul.int_matmul") in found
    assert ("dtypes/__init__.py", "qtorch.dtypes.ops") in found


def test_nothing_unpickles() -> None:
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


def test_nothing_asks_for_the_kind_of_a_layout() -> None:
    """Code that does has to be changed for every new layout."""
    wrong = []
    for path, node in nodes():
        if path.parent == LAYOUTS:
            continue
        if is_call_of(node, "isinstance", "issubclass") and "Layout" in ast.unparse(node.args[1]):
            wrong.append(place(path, node))
        if isinstance(node, ast.Compare) and "type(" in ast.unparse(node) and "Layout" in ast.unparse(node):
            wrong.append(place(path, node))
    assert not wrong


def test_the_plain_layout_is_named_in_few_places() -> None:
    """A default has to be named somewhere, and __init__ exports it; every other mention would be a special case."""
    allowed = {
        Path("dtypes/factories.py"),
        Path("dtypes/affine_quantized_tensor.py"),
        Path("dtypes/codebook_tensor.py"),
    }
    wrong = [
        place(path, node)
        for path, node in nodes()
        if path not in allowed
        and path.parent != LAYOUTS
        and path.name != "__init__.py"
        and "PlainLayout" in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
    ]
    assert not wrong
