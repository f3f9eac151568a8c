"""Damaged files of every reader beside that of `save_quantized` (see `checkpoints`): what others wrote, and what an
interrupted call left.

`run` is what `workers` calls with the module ``tests.attack.readers:READER``. A case may take `SECONDS` of processor
time and `MEMORY` beside what the process has, raise `ValueError` or `FileNotFoundError` that names the file, and change
nothing outside of its folder.
"""

import functools
import json
import os
import random
import resource
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import qtorch
from qtorch.calibration import Nearest, calibrated
from qtorch.calibration.allocation.allocation import Allocation, Row
from qtorch.checkpoint.sources import open_source
from qtorch.checkpoint.streaming import partial
from qtorch.cli.recipes import read_config
from qtorch.kernels.cpu import variants
from tests.attack import damage
from tests.calibration import test_resume
from tests.float_checkpoints import decoder, save_shards
from tests.formats import test_bitnet_mxfp4, test_float8, test_gptq_awq, test_hqq_quanto, test_torchao
from tests.formats.folders import Layer, plain_tensors, quantized_config, write

SECONDS = 2.0
MEMORY = 2**30
ROOT = "case"
"""The folder of a case, beside which lies what may not change."""


class Reader(NamedTuple):
    """
    Attributes:
        make: writes what is going to be damaged to a folder.
        read: reads it; what is wrong with what it gives, or None. Its second argument says whether the damage is of the
            kind that checksums tell.
        refuses: whether it may raise; what cannot be continued is begun anew.
    """

    make: Callable[[Path], object]
    read: Callable[[Path, bool], str | None]
    refuses: bool = True


# --- folders of other packages ---
INT4 = qtorch.int4_weight_only(group_size=32)


def torchao(path: Path) -> Path:
    parts, attributes = test_torchao.int8()
    entry = {"_type": "Int8Tensor", "_data": attributes}
    tensors = {f"layer._weight_{name}": part for name, part in parts.items()} | plain_tensors(64, torch.bfloat16)
    metadata = {"layer.weight": json.dumps(entry), "tensor_names": json.dumps(["layer.weight"])}
    return write(path, tensors, 1, quantized_config("torchao", "bfloat16"), metadata)


def ours(format: str, path: Path) -> Path:
    model = Layer(32, 64).bfloat16()
    qtorch.quantize_(model, INT4)
    qtorch.save_quantized(model, path, format=format)
    return path


def bitsandbytes() -> dict[str, torch.Tensor]:
    from tests.formats import test_bitsandbytes

    return test_bitsandbytes.layer("nf4", True)[0]


def deepseek() -> dict[str, torch.Tensor]:
    stored = {"layer.weight": test_float8.e4m3(32, 64), "layer.weight_scale_inv": torch.rand(2, 2)}
    return {**stored, **plain_tensors(64, torch.bfloat16)}


GPTQ, BF16 = {"bits": 4, "group_size": 32}, "bfloat16"
WRITTEN: dict[str, tuple[Callable[[], Mapping[str, torch.Tensor]], dict[str, Any]]] = {
    "auto_round": (
        lambda: test_gptq_awq.layer(4, 3),
        quantized_config("auto-round", packing_format="auto_round:gptqmodel", **GPTQ),
    ),
    "awq": (test_gptq_awq.layer_of_awq, test_gptq_awq.config()),
    "bitnet": (test_bitnet_mxfp4.layer, test_bitnet_mxfp4.config()),
    "bitsandbytes": (bitsandbytes, quantized_config("bitsandbytes", BF16)),
    "deepseek": (deepseek, quantized_config("fp8", BF16, weight_block_size=[16, 32])),
    "gptq": (lambda: test_gptq_awq.layer(4, 3), quantized_config("gptq", checkpoint_format="gptq_v2", **GPTQ)),
    "hqq": (lambda: test_hqq_quanto.layer(3), quantized_config("hqq")),
    "modelopt": (test_float8.nvfp4, quantized_config("modelopt", BF16, quant_algo="NVFP4")),
    "mxfp4": (test_bitnet_mxfp4.layer_of_mxfp4, quantized_config("mxfp4", BF16)),
    "quanto": (test_hqq_quanto.layer_of_quanto, quantized_config("quanto", BF16)),
}


def others(name: str, path: Path) -> Path:
    tensors, config = WRITTEN[name]
    return write(path, tensors(), 1, config)


SHAPES: dict[str, tuple[int, ...]] = {
    **{"auto_round": (32, 96), "gptq": (32, 96), "bitsandbytes": (24, 128), "torchao": (24, 64)},
    "mxfp4": test_bitnet_mxfp4.MXFP4_SHAPE,
}
FOLDERS: dict[str, Callable[[Path], Path]] = {
    **{name: functools.partial(others, name) for name in WRITTEN},
    "compressed_tensors": functools.partial(ours, "compressed-tensors"),
    "floats": lambda path: write(path, Layer(32, 64).state_dict(), 2, {"dtype": "float32"}),
    "torchao": torchao,
    "torchao_pickle": lambda path: test_torchao.written(path, test_torchao.layer(), 2),
    "transformers": functools.partial(ours, "transformers"),
}
"""By name: what writes a folder with a weight of `SHAPES`. Every registered format but GGUF and the own."""


def load(shape: tuple[int, ...], path: Path, whole: bool) -> str | None:
    model = Layer(*shape)
    before = model.layer.weight
    try:
        qtorch.load_quantized(model, path)
    except BaseException:
        assert model.layer.weight is before, "half loaded"
        raise
    weight = model.layer.weight
    if tuple(weight.shape) != shape:
        return f"the weight has the shape {tuple(weight.shape)}"
    if isinstance(weight, qtorch.dtypes.QuantizedTensor):
        if tuple(weight.dequantize().shape) != shape:
            return "dequantizes to another shape"
        model(torch.randn(2, shape[1], dtype=weight.dtype))
    return None


# --- single files ---
def gguf(path: Path) -> Path:
    from tests.formats.gguf import test_blocks as test_container

    path.mkdir()
    return test_container.file(path / "model.gguf")


def read_gguf(path: Path, whole: bool) -> str | None:
    with open_source(path / "model.gguf") as source:
        for name in sorted(source.names):
            if tuple(source.tensor(name).shape) != tuple(source.contents(name).shape):
                return f"{name} has another shape than its header says"
    return None


def allocation(path: Path) -> Path:
    names = ("floating point", str(INT4))
    rows = tuple(
        Row(f"{i}.weight", (), (32, 64), 2048, names, (8192, 1280), (0.0, 0.25), 1, 99, unfit=(("fp6", "why"),))
        for i in range(3)
    )
    recipes = {row.name: INT4 for row in rows}
    swaps = {"before": 0.5, "after": 0.25, "tried": 4, "kept": 1}
    return Allocation(rows, "4.5 bits", 5000, 64, "error", ((3840, 0.75), (24576, 0.0)), swaps, recipes).save(
        path, png=False
    )


def read_allocation(path: Path, whole: bool) -> str | None:
    made = Allocation.load(path)
    assert all(recipe is None or isinstance(recipe, qtorch.recipes.base.Recipe) for recipe in made.values())
    str(made), repr(made), made.uniform
    return None if Allocation.from_json(json.loads(json.dumps(made.to_json()))).rows == made.rows else "other rows"


def ways(path: Path) -> None:
    path.mkdir()
    tables = {"avx2": {"this": variants.read(variants.SHIPPED)["avx2"].popitem()[1]}, "amx": {"that": {}}}
    variants.write(path / "ways.json", tables)


def read_ways(path: Path, whole: bool) -> str | None:
    for of_set in variants.read(path / "ways.json").values():
        for table in of_set.values():
            if any(steps[-1][0] is not None for steps in table.values()):
                return "a last step with a limit"
    return None


def launch(path: Path) -> None:
    path.mkdir()
    shutil.copy(qtorch.kernels.cuda.launch_config.SHIPPED / "default.json", path / "launch.json")


def read_launch(path: Path, whole: bool) -> str | None:
    table = qtorch.kernels.cuda.launch_config.Table.read(path / "launch.json")
    for op, dtype, _ in list(table.entries):
        table.nearest(op, dtype, (16, 64, 64))
    table.write(path / "again.json")
    return None


def recipes(path: Path) -> None:
    path.mkdir()
    given = {
        "lm_head": None, r".*\.q_proj": {"recipe": "int4_weight_only", "group_size": 32},
        r".*_proj": "int8_weight_only()", ".*": qtorch.primitives.to_json(INT4),
    }  # fmt: skip
    (path / "recipes.json").write_text(json.dumps(given))


def read_recipes(path: Path, whole: bool) -> str | None:
    made = read_config(path / "recipes.json")
    return None if all(value is None or str(value) for value in made.values()) else "no recipe"


# --- what an interrupted call left ---
class Interruption(Exception):
    pass


@functools.cache
def source(format: str) -> Path:
    if format != "gguf":
        return save_shards(decoder().state_dict(), _folder() / "float", 3)
    from tests.formats.gguf import trained

    model = trained.built("Llama", hidden_size=64, intermediate_size=64, head_dim=16)
    return trained.save_folder(model, _folder() / "llama")


@contextmanager
def journals_at_once(stop: int | None) -> Iterator[None]:
    """With a journal after each tensor, and dying at one of them."""
    add, sizes = partial.Partial.add, (partial.JOURNAL_BYTES, partial._DATA_PER_JOURNAL)

    def watched(self: partial.Partial, name: str, *rest: Any) -> int:
        if self.done == stop:
            raise Interruption
        return add(self, name, *rest)

    partial.JOURNAL_BYTES, partial._DATA_PER_JOURNAL = 1, 0
    partial.Partial.add = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        partial.JOURNAL_BYTES, partial._DATA_PER_JOURNAL = sizes
        partial.Partial.add = add  # type: ignore[method-assign]


def quantized(format: str, folder: Path) -> None:
    name = {"qtorch": "q.safetensors", "gguf": "q.gguf"}.get(format, "q")
    recipe = {"gguf": qtorch.gguf_q8_0()}.get(format, INT4)
    if format in ("gptq", "awq"):  # they pack multiples of 32
        recipe = {r"lm_head|odd\.weight": None, ".*": INT4}
    qtorch.quantize_checkpoint(source(format), folder / name, recipe, format=format, max_shard_size=6000)


def unfinished(format: str, path: Path) -> None:
    path.mkdir()
    with suppress(Interruption), journals_at_once(7):
        quantized(format, path)


@functools.cache
def wanted(format: str) -> Mapping[str, bytes]:
    folder = _folder() / f"wanted {format}"
    folder.mkdir()
    quantized(format, folder)
    return contents(folder)


def finish(format: str, path: Path, whole: bool) -> str | None:
    quantized(format, path)
    if (left := contents(path)) != wanted(format) and whole:
        differ = [name for name in left.keys() | wanted(format) if left.get(name) != wanted(format).get(name)]
        return f"continued with other files: {differ}"
    return None


def calibrate(path: Path, dies_at: int = -1) -> Mapping[str, torch.Tensor]:
    calls = 0

    def counted(model: Any, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == dies_at:
            raise Interruption
        return model(batch)

    torch.manual_seed(0)
    model = test_resume.Model(2)
    recipe = calibrated(test_resume.INT3, test_resume.batches(1), rounding=Nearest(), forward=counted)
    qtorch.quantize_(model, recipe, resume=path)
    return test_resume.bits(model)


def calibration(path: Path) -> None:
    with suppress(Interruption):
        calibrate(path, 12)


@functools.cache
def calibrated_bits() -> Mapping[str, torch.Tensor]:
    return calibrate(_folder() / "calibrated")


def finish_calibration(path: Path, whole: bool) -> str | None:
    made = calibrate(path)
    if whole and not all(torch.equal(made[name], tensor) for name, tensor in calibrated_bits().items()):
        return "continued to other weights"
    return None


READERS: dict[str, Reader] = {
    **{name: Reader(make, functools.partial(load, SHAPES.get(name, (32, 64)))) for name, make in FOLDERS.items()},
    "allocation": Reader(allocation, read_allocation),
    "calibration": Reader(calibration, finish_calibration, refuses=False),
    "gguf": Reader(gguf, read_gguf),
    "launch": Reader(launch, read_launch),
    "recipes": Reader(recipes, read_recipes),
    **{
        f"unfinished {format}": Reader(
            functools.partial(unfinished, format), functools.partial(finish, format), refuses=False
        )
        for format in ("qtorch", "transformers", "compressed-tensors", "gptq", "awq", "gguf")
    },
    "ways": Reader(ways, read_ways),
}


# --- damage ---
def contents(folder: Path) -> dict[str, bytes]:
    """By name; of files that `edit_places` has grown, the first megabyte."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.open("rb").read(1 << 20) for path in sorted(found)}


HUGE = 40 * 2**30


def edit_places(folder: Path, rng: random.Random) -> tuple[str, bool]:
    """What is there in place of a file."""
    path = damage.a_file(folder, rng)
    assert path is not None
    kind = rng.choice(["nothing", "folder", "pipe", "loop", "dangling", "device", "outside", "grown", "huge"])
    if kind == "grown":
        os.truncate(path, HUGE)
        return f"{path.name}: {HUGE} bytes", True
    if kind == "huge":  # a header, and lengths in it, that the size of the file allows
        data = bytearray(path.read_bytes())
        at = rng.choice([0, 8, 16, 24, rng.randrange(max(1, len(data) - 8))])
        data[at : at + 8] = rng.choice([HUGE // 2, HUGE // 64, 2**33, 10**8, 2**20]).to_bytes(8, "little")
        path.write_bytes(data)
        os.truncate(path, HUGE)
        return f"{path.name}: {HUGE} bytes, a length at {at}", True
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("loop", "dangling", "device", "outside"):
        outside = next(parent for parent in path.parents if parent.name == ROOT).with_name("victim")
        places = {"loop": path, "dangling": folder / "none", "device": Path("/dev/zero"), "outside": outside}
        path.symlink_to(places[kind])
    return f"{path.name}: {kind}", True


def edit_header(folder: Path, rng: random.Random) -> tuple[str, bool]:
    """One that says the same has other bytes, and so has what is continued."""
    what, _ = damage.edit_header(folder, rng)
    return what, False


DAMAGES: list[damage.Damage] = [
    *[damage.edit_json] * 4, *[edit_header] * 2, damage.edit_bytes, damage.edit_tensor, edit_places,
]  # fmt: skip


# --- a case ---
@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="attack-"))  # in the folder that `workers` removes


@functools.cache
def pristine(name: str) -> tuple[Path, float]:
    """What is damaged, and the processor time that reading it takes: kernels are compiled, caches filled."""
    reader = READERS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reader.make(_folder() / name)
    for again in ("first", "second"):
        copy = _folder() / f"{name} {again}"
        shutil.copytree(_folder() / name, copy)
        start = time.process_time()
        assert reader.read(copy, True) is None
    if not reader.refuses:  # from the start
        start = time.process_time()
        assert reader.read(_folder() / f"{name} from the start", True) is None if name == "calibration" else True
    return _folder() / name, time.process_time() - start


def damaged(name: str, seed: int, folder: Path) -> tuple[str, bool]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    return rng.choice(DAMAGES)(folder, rng)


def run(seed: int, name: str) -> str | None:
    """What is wrong with the case `seed` of a reader; None if nothing is."""
    whole, seconds = pristine(name)
    outer = Path(tempfile.mkdtemp(dir=_folder()))
    try:
        (outer / "victim").write_text("precious")
        target = outer / ROOT
        shutil.copytree(whole, target)
        what, told = damaged(name, seed, target)
        found = attack(READERS[name], target, told, seconds)
        beside = {path.name for path in outer.iterdir()} - {ROOT}
        if beside != {"victim"} or (outer / "victim").read_bytes() != b"precious":
            found = f"changed what is beside its folder; {found}"
        return None if found is None else f"{what}: {found}"
    finally:
        shutil.rmtree(outer)


def attack(reader: Reader, target: Path, told: bool, seconds: float) -> str | None:
    start = time.process_time()
    try:
        with warnings.catch_warnings(), memory(MEMORY):
            warnings.simplefilter("ignore")
            found = reader.read(target, told)
    except (ValueError, FileNotFoundError) as error:
        if not reader.refuses and told:
            return f"refused: {type(error).__name__}: {error}"
        found = (
            None if str(target) in str(error) and not isinstance(error, UnicodeError) else f"names no file: {error!r}"
        )
    except Exception as error:
        return f"{type(error).__name__}: {error} {traceback.format_exc(limit=-3)}"
    spent = time.process_time() - start
    return found if spent < SECONDS + 2 * seconds or found else f"took {spent:.1f} s"


@contextmanager
def memory(extra: int) -> Iterator[None]:
    """With at most this much more address space than now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if "ASAN_OPTIONS" not in os.environ:
        resource.setrlimit(resource.RLIMIT_AS, (now + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
