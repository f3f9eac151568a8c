"""What the demo measured: a row per recipe, what it has to hold, the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from demo_speed import Speed
from sentence_model import Quality

from qtorch.model.report import format_table


@dataclass(frozen=True)
class Size:
    """Bytes.

    Attributes:
        file: of the saved model.
        linear_on_disk, linear_in_memory: of the linear weights, with scales and zero points. They differ by what
            the layout in memory pads.
    """

    file: int
    linear_on_disk: int
    linear_in_memory: int


@dataclass(frozen=True)
class Result:
    """One model as loaded from its file: the float one or one recipe's.

    Attributes:
        name: the recipe, or ``"float32"``.
        kernels: what runs the linear layers.
        equal_after_load: the loaded model gives the same bits as the one that was saved.
    """

    name: str
    size: Size
    quality: Quality
    speed: Speed
    kernels: str
    equal_after_load: bool


@dataclass(frozen=True)
class Target:
    """What a recipe promises on this model.

    Attributes:
        mrr: least share of the float model's.
        cosine: least mean cosine to the float model's embeddings.
        linear_share: largest size of the linear weights in memory, as a share of fp32.
        file_share: largest size of the file, as a share of the float model's.
    """

    mrr: float
    cosine: float
    linear_share: float | None = None
    file_share: float | None = None


TARGETS = {
    "int8_weight_only": Target(mrr=0.99, cosine=0.999, linear_share=0.26),
    "int8_weight_only targets=all": Target(mrr=0.99, cosine=0.999, linear_share=0.26, file_share=0.27),
    "int8_dynamic_activation_int8_weight": Target(mrr=0.985, cosine=0.995),
    "int4_weight_only(group_size=32)": Target(mrr=0.97, cosine=0.97),
}

LEAST_AGREEMENT = 0.99
"""Mean cosine of compiled to eager embeddings."""


@dataclass(frozen=True)
class Check:
    """Something that has to hold, in words and numbers."""

    text: str
    holds: bool

    def __str__(self) -> str:
        return f"  {'holds ' if self.holds else 'MISSED'}  {self.text}"


def checks(results: Sequence[Result]) -> list[Check]:
    """All that the demo promises of each result; the first is the float model's."""
    return [check for result in results for check in _checks(result, results[0])]


def _checks(result: Result, base: Result) -> list[Check]:
    found = [("output equal bit for bit after save and load", result.equal_after_load)]
    if target := TARGETS.get(result.name):
        kept, cosine = result.quality.mrr / base.quality.mrr, result.quality.cosine
        found.append((f"MRR {kept:.1%} of float's, at least {target.mrr:.1%}", kept >= target.mrr))
        found.append((f"cosine to float {cosine:.4f}, at least {target.cosine}", cosine >= target.cosine))
        if target.linear_share is not None:
            share = result.size.linear_in_memory / base.size.linear_in_memory
            text = f"linear weights {share:.1%} of their fp32 size, at most {target.linear_share:.0%}"
            found.append((text, share <= target.linear_share))
        if target.file_share is not None:
            share = result.size.file / base.size.file
            found.append((f"file {share:.1%} of float's, at most {target.file_share:.0%}", share <= target.file_share))
    if result.speed.compiled is not None or result.speed.recompiles:
        found.append(("compiled once for batches of all shapes", not result.speed.recompiles))
    if (agreement := result.speed.agreement) is not None:
        text = f"cosine of compiled to eager {agreement:.4f}, at least {LEAST_AGREEMENT}"
        found.append((text, agreement >= LEAST_AGREEMENT))
    return [Check(f"{result.name}: {text}", holds) for text, holds in found]


HEADER = (
    "recipe",
    "file MB",
    "linear: disk",
    "memory",
    "MRR   of float",
    "recall@1",
    "cosine",
    "eager/s",
    "compiled/s",
)

NOTES = """\
linear: weights of the linear layers with their scales, in % of fp32; codes of 4 bits share a byte, in memory and in
the file. Speeds: sentences per second, and how many times float's in the same mode."""


def table(results: Sequence[Result]) -> str:
    """One line per result, relative to the first one, with notes; below, what runs the linear layers."""
    rows = [_cells(result, results[0]) for result in results]
    kernels = [(result.name, result.kernels) for result in results]
    return f"{format_table(HEADER, rows)}\n{NOTES}\n\n{format_table(('recipe', 'linear layers run'), kernels)}"


def _cells(result: Result, base: Result) -> tuple[str, ...]:
    size, quality, speed = result.size, result.quality, result.speed
    return (
        result.name,
        f"{size.file / 1e6:7.1f}",
        f"{size.linear_on_disk / base.size.linear_on_disk:12.1%}",
        f"{size.linear_in_memory / base.size.linear_in_memory:6.1%}",
        f"{quality.mrr:.3f}   {quality.mrr / base.quality.mrr:6.1%}",
        f"{quality.recall_at_1:8.3f}",
        f"{quality.cosine:.4f}",
        _speed_cell(speed.eager, base.speed.eager),
        "recompiles" if speed.recompiles else _speed_cell(speed.compiled, base.speed.compiled),
    )


def _speed_cell(value: float | None, base: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:4.0f}  {value / base:4.2f}x" if base else f"{value:4.0f}"
