"""Seeded damage: what an attacker, or a broken disk, makes of a file. The same seed makes the same damage.

`mutate` changes a tree of JSON data, `damage_bytes` bytes; each `Damage` changes a file of a folder, and makes
checksums fit again where they are beside what it changes.
"""

import copy
import json
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qtorch.checkpoint import part_file, tensor_file

Place = tuple[Any, ...]
"""Keys and indices from the root of a tree to a node."""

_NUMBERS = [0, 1, -1, 7, 2**31, 2**63, -(2**63) - 1, 10**40, 0.5, 1e308, float("nan"), float("inf")]
_TEXTS = ["", "x", "../x", "\0", "é" * 300]
_LISTS: list[Any] = [[], {}, [[]], [1, 2], [-1, -1]]
_OBJECTS: list[Any] = [{"type": "PerGroup", "group_size": 32}, {"type": "Rounding"}, {"type": []}, {"type": "Scheme"}]
_DTYPES = ["torch.int8", "torch.float64", "torch.complex64", "QDType.int32", "QDType.uint4", "QDType.float8_e4m3fn"]
_WORDS = ["MappingType.ASYMMETRIC", "ZeroPointDomain.FLOAT", "Rounding.STOCHASTIC", "torch.load", "QDType.", "weight"]

STRANGE = [None, True, False, *_NUMBERS, *_TEXTS, *_LISTS, *_OBJECTS, {"a": {"b": []}}, *_DTYPES, *_WORDS]
"""Values to put in place of others: every type, bounds of numbers, names that mean something elsewhere."""


def paths(tree: Any, at: Place = ()) -> Iterator[Place]:
    """Of every node, the root included."""
    yield at
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from paths(value, (*at, key))


def node(tree: Any, path: Place) -> Any:
    """The node at `path`."""
    for key in path:
        tree = tree[key]
    return tree


DEEP = {f"@nested {depth}": "[" * depth + "]" * depth for depth in (50, 900, 100_000)}
"""What stands for lists nested so deep that Python code cannot handle them as trees, and their text."""


def text_of(tree: Any) -> str:
    """The JSON text of a tree that `mutate` has made."""
    text = json.dumps(tree)
    for name, nested in DEEP.items():
        text = text.replace(json.dumps(name), nested)
    return text


class Mutator:
    """Changes one place of a tree at a time."""

    def __init__(self, tree: Any, rng: random.Random) -> None:
        self.tree = copy.deepcopy(tree)
        self.rng = rng

    def pick(self, wanted: Callable[[Any], bool] = lambda value: True) -> Place | None:
        """A node below the root for which `wanted` holds; a depth is chosen first, as most nodes are leaves."""
        found = [path for path in paths(self.tree) if path and wanted(node(self.tree, path))]
        if not found:
            return None
        depth = self.rng.choice(sorted({len(path) for path in found}))
        return self.rng.choice([path for path in found if len(path) == depth])

    def put(self, path: Place, value: Any) -> str:
        node(self.tree, path[:-1])[path[-1]] = value
        return f"{path} = {value!r:.60}"

    # Each returns what it has done, or None where the tree has nothing for it.

    def replace(self) -> str | None:
        path = self.pick()
        return None if path is None else self.put(path, copy.deepcopy(self.rng.choice(STRANGE)))

    def nudge(self) -> str | None:
        """Another number."""
        path = self.pick(lambda value: isinstance(value, int | float) and not isinstance(value, bool))
        if path is None:
            return None
        value = node(self.tree, path)
        others = [value + 1, value - 1, value * 2, -value, value * 2**32, value / 2, value // 2 if value else 3, 0]
        return self.put(path, self.rng.choice(others))

    def flip(self) -> str | None:
        """Another boolean."""
        path = self.pick(lambda value: isinstance(value, bool))
        return None if path is None else self.put(path, not node(self.tree, path))

    def respell(self) -> str | None:
        """Another string: cut, doubled, or with another character."""
        path = self.pick(lambda value: isinstance(value, str) and value != "")
        if path is None:
            return None
        text = node(self.tree, path)
        i = self.rng.randrange(len(text))
        return self.put(path, self.rng.choice([text[:i], text * 2, f"{text[:i]}7{text[i + 1 :]}", text.upper()]))

    def delete(self) -> str | None:
        path = self.pick()
        if path is None:
            return None
        del node(self.tree, path[:-1])[path[-1]]
        return f"del {path}"

    def duplicate(self) -> str | None:
        path = self.pick()
        if path is None:
            return None
        parent, value = node(self.tree, path[:-1]), copy.deepcopy(node(self.tree, path))
        if isinstance(parent, list):
            parent.insert(path[-1], value)
        else:
            parent[f"{path[-1]}2"] = value
        return f"{path} twice"

    def rename(self) -> str | None:
        path = self.pick(lambda value: isinstance(value, dict) and bool(value))
        if path is None:
            return None
        table = node(self.tree, path)
        key = self.rng.choice(sorted(table))
        new = self.rng.choice([f"{key}x", "", "weight", "type", "codes", "../x", key.upper()])
        table[new] = table.pop(key)
        return f"{path}: {key} -> {new}"

    def pair(self) -> tuple[Place, Place] | None:
        """Two nodes of the same type."""
        first = self.pick()
        if first is None:
            return None
        kind = type(node(self.tree, first))
        second = self.pick(lambda value: type(value) is kind)
        assert second is not None
        return first, second

    def swap(self) -> str | None:
        """Two nodes of the same type."""
        found = self.pair()
        if found is None:
            return None
        first, second = found
        if first[: len(second)] == second or second[: len(first)] == first:
            return None
        a, b = node(self.tree, first), node(self.tree, second)
        self.put(first, b)
        self.put(second, a)
        return f"{first} <-> {second}"

    def copy(self) -> str | None:
        """A node in place of another of the same type."""
        found = self.pair()
        return None if found is None else self.put(found[0], copy.deepcopy(node(self.tree, found[1])))

    def nest(self) -> str | None:
        path = self.pick()
        return None if path is None else self.put(path, self.rng.choice(list(DEEP)))

    def reorder(self) -> str | None:
        """The keys of an object in another order, which means nothing."""
        path = self.pick(lambda value: isinstance(value, dict) and len(value) > 1)
        if path is None:
            return None
        table = node(self.tree, path)
        keys = list(table)
        self.rng.shuffle(keys)
        self.put(path, {key: table[key] for key in keys})
        return f"{path}: in another order"


MUTATIONS = [
    *[Mutator.replace] * 3, *[Mutator.nudge] * 3, *[Mutator.copy] * 2, *[Mutator.swap] * 2, *[Mutator.delete] * 2,
    Mutator.flip, Mutator.respell, Mutator.duplicate, Mutator.rename, Mutator.nest, Mutator.reorder,
]  # fmt: skip


def mutate(tree: Any, rng: random.Random) -> tuple[Any, str]:
    """A damaged copy of JSON data (an object or list at the root), and what was done to it: one to three changes.
    `text_of` writes it."""
    mutator = Mutator(tree, rng)
    done: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = rng.choice(MUTATIONS)(mutator)
        if change is not None:
            done.append(change)
    return mutator.tree, "; ".join(done) or "nothing"


def damage_bytes(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A damaged copy of `data`, and what was done to it: truncated, extended, or with other bytes somewhere."""
    kind = rng.choice(["truncate", "extend", "flip", "overwrite", "zero", "shift"])
    at = rng.randrange(len(data) + 1)
    length = rng.choice([1, 4, 8, 64, 4096])
    changed = bytearray(data)
    if kind == "truncate":
        del changed[at:]
    elif kind == "extend":
        changed += rng.randbytes(length)
    elif kind == "flip" and data:
        changed[at % len(data)] ^= 1 << rng.randrange(8)
    elif kind == "shift":
        del changed[at : at + length]
    else:
        changed[at : at + length] = rng.randbytes(length) if kind == "overwrite" else bytes(length)
        del changed[len(data) :]
    return bytes(changed), f"{kind} at {at}, {length} bytes"


# --- damage to the files of a folder ---
Damage = Callable[[Path, random.Random], tuple[str, bool]]
"""Changes a folder: what was done, and whether checksums tell."""


def a_file(folder: Path, rng: random.Random, *suffixes: str) -> Path | None:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name.endswith(suffixes or ("",)))
    return rng.choice([path for path in found if path.suffix not in (".html",) and path.name != "lock"] or [None])


def take_apart(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header, data) of a safetensors file."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def put_together(path: Path, header: str, data: bytes) -> None:
    text = header.encode(errors="replace")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def with_metadata(tree: dict[str, Any], key: str, text: str) -> dict[str, Any]:
    """The header with other metadata, and a checksum that fits where there is one."""
    metadata = {**tree["__metadata__"], key: text}
    if f"{key}.crc32" in metadata:
        metadata[f"{key}.crc32"] = str(zlib.crc32(text.encode(errors="replace")))
    return {**tree, "__metadata__": metadata}


def edit_bytes(folder: Path, rng: random.Random) -> tuple[str, bool]:
    path = a_file(folder, rng)
    assert path is not None
    changed, what = damage_bytes(path.read_bytes(), rng)
    path.write_bytes(changed)
    return f"{path.name}: {what}", True


def edit_json(folder: Path, rng: random.Random) -> tuple[str, bool]:
    """A tree of JSON data, with a checksum that fits where there is one."""
    path = a_file(folder, rng, ".json")
    if path is None:
        return edit_header(folder, rng)
    tree, is_journal = json.loads(path.read_text()), path.name == part_file.JOURNAL
    changed, what = mutate(tree["data"] if is_journal else tree, rng)
    text = text_of(changed)
    if is_journal:
        text = f'{{"crc32": {zlib.crc32(text.encode())}, "data": {text}}}'
    path.write_text(text, errors="replace")
    return f"{path.name}: {what}", not is_journal


def edit_header(folder: Path, rng: random.Random) -> tuple[str, bool]:
    """The header of a safetensors file, or the JSON text in its metadata."""
    path = a_file(folder, rng, ".safetensors")
    if path is None:
        return edit_bytes(folder, rng)
    tree, data = take_apart(path)
    inner = [key for key, text in tree.get("__metadata__", {}).items() if text[:1] in ("{", "[")]
    if not inner or rng.random() < 0.5:
        changed, what = mutate(tree, rng)
        put_together(path, text_of(changed), data)
        return f"header of {path.name}: {what}", changed == tree
    key = rng.choice(inner)
    inside = json.loads(tree["__metadata__"][key])
    changed, what = mutate(inside, rng)
    put_together(path, json.dumps(with_metadata(tree, key, text_of(changed))), data)
    return f"{key} of {path.name}: {what}", changed == inside


def edit_tensor(folder: Path, rng: random.Random) -> tuple[str, bool]:
    """Another tensor in place of one, or none."""
    path = a_file(folder, rng, ".safetensors")
    if path is None:
        return edit_json(folder, rng)
    metadata, tensors = take_apart(path)[0].get("__metadata__", {}), load_file(path)
    if not tensors:
        return "no tensors", True
    name = rng.choice(sorted(tensors))
    changed, what = _another(tensors.pop(name), rng)
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, path, metadata)
    for root in [] if changed is None else folder.glob("*.safetensors"):
        tree, data = take_apart(root)
        if "qtorch" in tree.get("__metadata__", {}):
            header = json.loads(tree["__metadata__"]["qtorch"])
            header["checksums"][name] = tensor_file.checksum(tensors[name])
            put_together(root, json.dumps(with_metadata(tree, "qtorch", json.dumps(header))), data)
    return f"{name} of {path.name}: {what}", False


def _another(tensor: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor | None, str]:
    noise = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8)
    noise = noise % 2 if tensor.dtype is torch.bool else noise
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.bool])
    value = rng.choice([0, 1, 127] if not tensor.is_floating_point() else [0, -1, 1e30, float("nan"), float("inf")])
    changes: dict[str, Callable[[], torch.Tensor | None]] = {
        "removed": lambda: None,
        "flat": lambda: tensor.reshape(-1),
        "another rank": lambda: tensor.reshape(*tensor.shape, *[1] * rng.randint(1, 3)),
        "cut": lambda: tensor[:-1] if tensor.dim() else tensor.reshape(1),
        "twice": lambda: torch.cat([tensor.reshape(-1).view(torch.uint8)] * 2).view(tensor.dtype),
        "bytes": lambda: tensor.view(torch.uint8) if tensor.dim() else tensor,
        f"in {dtype}": lambda: torch.ones(tensor.shape).to(dtype),
        "empty": lambda: torch.zeros([0] * rng.randint(1, 3), dtype=tensor.dtype),
        f"{value} everywhere": lambda: torch.full(tensor.shape, value, dtype=torch.float64).to(tensor.dtype),
        "other bytes": lambda: noise.view(tensor.dtype).reshape(tensor.shape),
    }
    what = rng.choice(list(changes))
    return changes[what](), what
