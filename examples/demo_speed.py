"""How many sentences per second an encoder takes, in eager mode and compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from sentence_model import Batch, Encode, SentenceEncoder, embed, mean_cosine

FEWEST_PASSES, MOST_PASSES = 3, 7
SECONDS = 10.0
"""No further pass is begun after this long, once there are the fewest."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Speed:
    """Sentences per second.

    Attributes:
        eager, compiled: the two modes; compiled is None where it was not measured.
        recompiles: the compiled model was compiled anew for a batch of another shape.
        agreement: mean cosine of the compiled model's embeddings to the eager one's. Integer products agree to the
            last bit; what is compiled around them may round an activation to the code next to it.
    """

    eager: float
    compiled: float | None = None
    recompiles: bool = False
    agreement: float | None = None


def measure_speeds(
    encoders: Mapping[str, SentenceEncoder], batches: Sequence[Batch], compiled: bool, say: Say
) -> dict[str, Speed]:
    """Speeds of all encoders by name; of their compiled forms too if `compiled` is set and there is a C++ compiler."""
    say(f"eager speed, {sum(len(batch.rows) for batch in batches)} sentences a pass")
    eager = sentences_per_second(encoders, batches)
    fast = _compile_all(encoders, batches, say) if compiled else {}
    once = {name: encode for name, encode in fast.items() if encode is not None}
    if once:
        say("compiled speed")
    speeds = sentences_per_second(once, batches)
    return {
        name: Speed(
            eager[name],
            speeds.get(name),
            recompiles=name in fast and name not in once,
            agreement=mean_cosine(embed(once[name], batches), embed(encoder, batches)) if name in once else None,
        )
        for name, encoder in encoders.items()
    }


def sentences_per_second(encoders: Mapping[str, Encode], batches: Sequence[Batch]) -> dict[str, float]:
    """Median over passes in which the encoders take turns, so that a busy machine is busy for all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in encoders}
    end = time.perf_counter() + SECONDS
    for done in range(MOST_PASSES if encoders else 0):
        if done >= FEWEST_PASSES and time.perf_counter() > end:
            break
        for name, encode in encoders.items():
            start = time.perf_counter()
            embed(encode, batches)
            seconds[name].append(time.perf_counter() - start)
    sentences = sum(len(batch.rows) for batch in batches)
    return {name: sentences / median(times) for name, times in seconds.items()}


def _compile_all(
    encoders: Mapping[str, SentenceEncoder], batches: Sequence[Batch], say: Say
) -> dict[str, Encode | None]:
    """Compiled encoders, warm; None for one that needs more than one graph. Empty where nothing can be compiled."""
    if problem := _why_not_compiled():
        say(f"torch.compile does not work here, the column stays empty: {problem}")
        return {}
    return {name: _compile(name, encoder, batches, say) for name, encoder in encoders.items()}


def _compile(name: str, encoder: SentenceEncoder, batches: Sequence[Batch], say: Say) -> Encode | None:
    start = time.perf_counter()
    compiled = torch.compile(encoder, fullgraph=True, dynamic=True)
    embed(compiled, batches[:1])
    say(f"{name}: compiled in {time.perf_counter() - start:.0f} s")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            embed(compiled, batches)
    except RuntimeError as error:
        if "recompile" not in str(error):
            raise
        say(f"{name}: a batch of another shape is compiled anew, so the compiled speed is not measured")
        return None
    return compiled


def _why_not_compiled() -> str | None:
    """Why torch.compile does not work on this machine (no C++ compiler, say), in one line; None if it does."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8))
    except Exception as error:
        return next(line.strip() for line in str(error).splitlines() if line.strip())
    return None
