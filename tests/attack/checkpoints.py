"""Damaged checkpoints: the header, the file format, the bytes and the shards, each with checksums that fit or not.

`run` is what `workers` calls.
"""

import functools
import random
import shutil
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from qtorch import load_quantized, quantize_, save_quantized
from qtorch.dtypes import QuantizedTensor
from qtorch.recipes.base import RECIPES, Recipe
from tests import every_recipe
from tests.attack import damage

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


# --- what is done to them ---
def exchange_files(folder: Path, rng: random.Random) -> tuple[str, bool]:
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


DAMAGES: list[damage.Damage] = [*[damage.edit_header] * 6, damage.edit_bytes, damage.edit_tensor, exchange_files]
"""Each says what was done; and whether the right model is the only one that may load, where checksums are verified."""


# --- a case ---
def run(seed: int) -> str | None:
    """What is wrong with the case `seed`; None if nothing is."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name, shard_size = rng.choice(every_recipe.NAMES), rng.choice(SHARD_SIZES)
    target = Path(tempfile.mkdtemp(dir=_folder()))
    try:
        shutil.copytree(saved(name, shard_size), target, dirs_exist_ok=True)
        what, only_right = rng.choice(DAMAGES)(target, rng)
        options: dict[str, bool] = rng.choice([{}, {}, {}, {"mmap": True}, {"verify": False}])
        model = rng.choice([Net, meta])()
        known = only_right and options.get("verify", True)
        found = attack(model, target / NAME, options, right(name) if known else None)
        return None if found is None else f"{name}, {what}, {options}: {found}"
    finally:
        shutil.rmtree(target)


def attack(model: Net, path: Path, how: dict[str, bool], wanted: tuple[dict[str, Tensor], Tensor] | None) -> str | None:
    before = contents(model)
    try:
        load_quantized(model, path, **how)
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
    "mixed dtype", "must have the same dtype", "expected scalar type", "expected m1 and m2", "same dtype", "Input type",
)  # fmt: skip
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
