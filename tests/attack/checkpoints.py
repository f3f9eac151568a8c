"""Damaged checkpoints: the header, the file format, the bytes and the shards, each with checksums that fit or not.

``python -m tests.attack.checkpoints SEED`` runs one case and says what it is; `run` is what `workers` calls.
"""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import sys
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qtorch import load_quantized, quantize_, save_quantized
from qtorch.checkpoint.tensor_file import TensorFile, write_tensors
from qtorch.dtypes import QuantizedTensor
from qtorch.recipes.base import RECIPES, Recipe
from tests import every_recipe
from tests.attack.damage import damage_bytes, mutate, text_of

SIZE = 64
IDS = torch.arange(5)
NAME = "model.safetensors"

SHARED = ("int8_weight_only", "int4_weight_only", "nf4_weight_only")
"""Recipes that also quantize what others leave alone here: experts, and an embedding tied to the head."""


class Net(nn.Module):
    """Every kind of place that a tensor can have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, SIZE)
        self.fc = nn.Linear(SIZE, SIZE)
        self.norm = nn.LayerNorm(SIZE)
        self.conv = nn.Conv2d(SIZE, SIZE, 2)
        self.experts = nn.Parameter(torch.randn(2, SIZE, SIZE))
        self.head = nn.Linear(SIZE, 24, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("mask", torch.arange(SIZE) % 2 == 0)
        self.register_buffer("angles", torch.randn(SIZE), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.fc(self.embed(ids) * self.angles)) * self.mask
        x = self.conv(x.reshape(1, 5, SIZE, 1).transpose(1, 2).expand(1, SIZE, 5, 2)).reshape(SIZE, 4).t()
        return self.head(torch.bmm(torch.stack([x, x]), self.experts.mT).sum(0))


def meta() -> Net:
    with torch.device("meta"):
        return Net()


def recipe_of(name: str) -> Recipe:
    return every_recipe.make(name, 32)


SHARD_SIZES = (2**30, 20_000, 1)


@functools.cache
def saved(name: str, shard_size: int) -> Path:
    """A folder with the checkpoint of a model, the same on each call."""
    folder = _folder() / f"{name}-{shard_size}"
    folder.mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
    recipes: dict[str, Recipe | None] = {"fc": recipe_of(name), "conv": recipe_of(name)}
    if name in SHARED:
        recipes |= {"experts": recipe_of(name), "embed": RECIPES["int8_weight_only"]()}
    quantize_(model, recipes)
    save_quantized(model, folder / NAME, max_shard_size=shard_size)
    return folder


@functools.cache
def _folder() -> Path:
    # In the folder that `workers` removes.
    return Path(tempfile.mkdtemp(prefix="attack-"))


@functools.cache
def right(name: str) -> tuple[dict[str, Tensor], Tensor]:
    """The parameters and buffers of that model, and what it computes."""
    model = load_quantized(meta(), saved(name, SHARD_SIZES[0]) / NAME)
    with torch.no_grad():
        return contents(model), model(IDS)


def contents(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


# --- files as trees ---


def take_apart(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header of the format, data)."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def put_together(path: Path, header: str, data: bytes) -> None:
    text = header.encode(errors="replace")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def header_of(tree: dict[str, Any]) -> dict[str, Any]:
    """Our header, in that of the format."""
    return json.loads(tree["__metadata__"]["qtorch"])


def with_header(tree: dict[str, Any], text: str) -> dict[str, Any]:
    checksum = str(zlib.crc32(text.encode(errors="replace")))
    return {**tree, "__metadata__": {**tree["__metadata__"], "qtorch": text, "qtorch.crc32": checksum}}


def crc_of(tensor: Tensor) -> int:
    kind = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), kind)


# --- what is done to them ---

Damaged = tuple[str, bool]
"""What was done; and whether the right model is the only one that may load, where checksums are verified."""


def edit_header(folder: Path, rng: random.Random) -> Damaged:
    """Our header, with a checksum that fits."""
    path = folder / NAME
    tree, data = take_apart(path)
    header = header_of(tree)
    changed, what = mutate(header, rng)
    put_together(path, json.dumps(with_header(tree, text_of(changed))), data)
    return f"header: {what}", changed == header


def edit_format(folder: Path, rng: random.Random) -> Damaged:
    """The header of the format, of the root or a shard."""
    path = a_file(folder, rng)
    tree, data = take_apart(path)
    changed, what = mutate(tree, rng)
    put_together(path, text_of(changed), data)
    return f"format of {path.name}: {what}", changed == tree


def edit_bytes(folder: Path, rng: random.Random) -> Damaged:
    path = a_file(folder, rng)
    changed, what = damage_bytes(path.read_bytes(), rng)
    path.write_bytes(changed)
    return f"bytes of {path.name}: {what}", True


def edit_tensor(folder: Path, rng: random.Random) -> Damaged:
    """Another tensor in place of one, of another shape or dtype, with other values; the checksum fits."""
    path = folder / NAME
    tree, _ = take_apart(path)
    header = header_of(tree)
    files = {file: read_all(file) for file in [path, *(folder / name for name in header["shards"])]}
    changed = []
    for _ in range(rng.choice([1, 1, 2])):
        owner, key = rng.choice([(file, key) for file, tensors in files.items() for key in tensors])
        files[owner][key], what = another(files[owner][key], rng)
        header["checksums"][key] = crc_of(files[owner][key])
        changed.append(f"{key}: {what}")
    for file, tensors in files.items():
        tree = with_header({"__metadata__": {}}, json.dumps(header)) if file == path else {"__metadata__": {}}
        write_tensors(file, tensors, tree["__metadata__"])
    return f"tensor {', '.join(changed)}", False


def read_all(path: Path) -> dict[str, Tensor]:
    file = TensorFile(path)
    tensors = {name: file.read(name) for name in file.stored}
    file.close()
    return tensors


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32, torch.bool]


def another(tensor: Tensor, rng: random.Random) -> tuple[Tensor, str]:
    kind = rng.choice(["dtype", "cut", "grow", "reshape", "values", "zeros", "extreme", "empty"])
    shape = list(tensor.shape)
    axis = rng.randrange(len(shape)) if shape else None
    if kind == "dtype":
        dtype = rng.choice(DTYPES)
        return torch.ones(shape).to(dtype), f"{dtype}"
    if kind in ("cut", "grow") and axis is not None:
        shape[axis] = max(0, shape[axis] - 1) if kind == "cut" else shape[axis] * 2
        return torch.zeros(shape, dtype=tensor.dtype), f"shape {shape}"
    if kind == "reshape":
        other = rng.choice([[-1], [1, -1], [*shape, 1], shape[::-1]])
        return tensor.reshape(other).contiguous(), f"reshaped {other}"
    if kind == "empty":
        return torch.zeros([0] * rng.randrange(4), dtype=tensor.dtype), "empty"
    if kind == "extreme":
        value = rng.choice([float("nan"), float("inf"), -1, 0, 1e30, 127])
        fill = value if tensor.is_floating_point() else int(value) if abs(value) < 128 else 255
        return torch.full(shape, 0).to(tensor.dtype) if tensor.dtype is torch.bool else full(tensor, fill), f"{value}"
    if kind == "zeros":
        return torch.zeros_like(tensor), "zeros"
    noise = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    noise = noise % 2 if tensor.dtype is torch.bool else noise
    return noise.view(tensor.dtype).reshape(shape), "other bytes"


def full(tensor: Tensor, value: float) -> Tensor:
    with contextlib.suppress(RuntimeError):
        return torch.full(tensor.shape, value, dtype=torch.float64).to(tensor.dtype)
    return torch.zeros_like(tensor)


def exchange_files(folder: Path, rng: random.Random) -> Damaged:
    """Shards that are missing, exchanged, of another save or no files; a root of another save."""
    shards = sorted(folder.glob("model-*"))
    path = rng.choice([*shards, folder / NAME])
    kind = rng.choice(["remove", "other save", "exchange", "folder", "link", "root as shard"])
    if kind == "remove":
        path.unlink()
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "exchange" and len(shards) > 1:
        first, second = rng.sample(shards, 2)
        data = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(data)
        return f"exchanged {first.name} and {second.name}", True
    elif kind == "link":
        path.unlink()
        path.symlink_to(rng.choice([path, folder / "nothing", Path("/dev/null")]))
    elif kind == "root as shard" and shards:
        path.write_bytes((folder / NAME).read_bytes())
        return f"the root as {path.name}", True
    else:
        name = rng.choice(every_recipe.NAMES)
        shutil.copy(rng.choice(sorted(saved(name, rng.choice(SHARD_SIZES)).glob("model*"))), path)
        # The whole of another checkpoint is one.
        return f"{path.name} of {name}", path.name != NAME
    return f"{kind}: {path.name}", True


def a_file(folder: Path, rng: random.Random) -> Path:
    return rng.choice([folder / NAME, *sorted(folder.glob("model*"))])


DAMAGES: list[Callable[[Path, random.Random], Damaged]] = [
    *[edit_header] * 4,
    *[edit_format] * 2,
    edit_bytes,
    edit_tensor,
    exchange_files,
]


# --- a case ---


def run(seed: int) -> str | None:
    """What is wrong with the case `seed`; None if nothing is."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name, shard_size = rng.choice(every_recipe.NAMES), rng.choice(SHARD_SIZES)
    target = Path(tempfile.mkdtemp(dir=_folder()))
    try:
        shutil.copytree(saved(name, shard_size), target, dirs_exist_ok=True)
        damage = rng.choice(DAMAGES)
        what, only_right = damage(target, rng)
        options: dict[str, bool] = rng.choice([{}, {}, {}, {"mmap": True}, {"verify": False}])
        model = rng.choice([Net, meta])()
        known = only_right and options.get("verify", True)
        found = attack(model, target / NAME, options, right(name) if known else None)
        return None if found is None else f"{name}, {what}, {options}: {found}"
    finally:
        shutil.rmtree(target)


def attack(
    model: Net, path: Path, options: dict[str, bool], wanted: tuple[dict[str, Tensor], Tensor] | None
) -> str | None:
    before = contents(model)
    try:
        load_quantized(model, path, **options)
    except (ValueError, OSError) as error:
        if isinstance(error, UnicodeError):
            return f"{type(error).__name__}: {error}"
        if str(path.parent) not in str(error):
            return f"names no file: {error}"
        after = contents(model)
        whole = after.keys() == before.keys() and all(after[name] is tensor for name, tensor in before.items())
        return None if whole else "half loaded"
    except Exception as error:
        return f"{type(error).__name__}: {error} {traceback.format_exc(limit=-3)}"
    if (problem := unsound(model)) is not None:
        return f"loaded, {problem}"
    return None if wanted is None else differs(model, *wanted)


MEANT = (
    "mixed dtype",
    "must have the same dtype",
    "expected scalar type",
    "expected m1 and m2",
    "same dtype",
    "Input type",
)
"""What torch says where a file has float parameters of dtypes that do not go together, as a float model may have."""


def unsound(model: Net) -> str | None:
    """What keeps a loaded model from working."""
    for name, tensor in contents(model).items():
        if isinstance(tensor, QuantizedTensor) and tensor.dequantize().shape != tensor.shape:
            return f"{name} dequantizes to {tuple(tensor.dequantize().shape)}"
    for _ in range(2):
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                y = model(IDS)
        except RuntimeError as error:
            if type(error) is RuntimeError and any(words in str(error) for words in MEANT):
                return None
            return f"but forward raises {type(error).__name__}: {error} {traceback.format_exc(limit=-3)}"
        except Exception as error:
            return f"but forward raises {type(error).__name__}: {error} {traceback.format_exc(limit=-3)}"
        if y.shape != (4, 24):
            return f"gives the shape {tuple(y.shape)}"
    return None


def differs(model: Net, tensors: dict[str, Tensor], y: Tensor) -> str | None:
    """How a model differs from the right one."""
    for name, tensor in contents(model).items():
        other = tensors[name]
        same = type(tensor) is type(other) and tensor.dtype == other.dtype and tensor.shape == other.shape
        if isinstance(tensor, QuantizedTensor):
            same = same and tensor.scheme == other.scheme  # type: ignore[attr-defined]
        if not same or not torch.equal(tensor, other):
            return f"loaded another model: {name}"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return None if torch.equal(model(IDS), y) else "computes something else"


if __name__ == "__main__":
    print(run(int(sys.argv[1])) or "nothing is wrong")
