"""Optimizers with moments of 8 and 4 bits on a small language model: what they save, and what it costs.

    python -m tutorials.low_bit_optimizers              a table for each optimizer; about a minute
    python -m tutorials.low_bit_optimizers --short      a few steps of each, to see that it runs

The model predicts the next character of this file. For each optimizer the table has the loss at the end, the bytes of
its states a parameter, and the time of a step. Then a run is saved half way and goes on: its loss is the same to the
last bit, because the states are saved as the codes that they are, and no random numbers are drawn.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qtorch.dtypes import QuantizedTensor
from qtorch.training import AdamW4bit, AdamW8bit, AdamWFp8

LENGTH, WIDTH = 32, 192


class Model(nn.Module):
    """Characters one after the other, by a recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.network = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.network(self.embedding(ids))[0])


def batch(step: int) -> Tensor:
    text = torch.tensor(list(Path(__file__).read_bytes()))
    starts = torch.randint(len(text) - LENGTH, (16,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + LENGTH + 1] for start in starts.tolist()])


def train(model: nn.Module, optimizer: Any, schedule: Any, steps: range) -> tuple[float, float]:
    """(mean loss of the last ten steps, seconds in the optimizer)."""
    losses, seconds = [], 0.0
    for step in steps:
        ids = batch(step)
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        start = time.perf_counter()
        optimizer.step()
        seconds += time.perf_counter() - start
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:]), seconds


def groups(model: Model) -> list[dict[str, Any]]:
    """The embedding keeps fp32 moments, whatever the optimizer: rare characters have few gradients."""
    others = [p for name, p in model.named_parameters() if not name.startswith("embedding")]
    return [{"params": others}, {"params": list(model.embedding.parameters()), "optim_bits": 32}]


OPTIMIZERS: dict[str, Callable[[Model], Any]] = {
    "torch AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    "AdamW8bit": lambda model: AdamW8bit(model.parameters(), lr=3e-3),
    "AdamWFp8": lambda model: AdamWFp8(model.parameters(), lr=3e-3),
    "AdamW4bit": lambda model: AdamW4bit(model.parameters(), lr=3e-3),
    "AdamW4bit, embedding in fp32": lambda model: AdamW4bit(groups(model), lr=3e-3),
}


def start(make: Callable[[Model], Any], steps: int) -> tuple[Model, Any, Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = make(model)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def bytes_a_parameter(model: nn.Module, optimizer: Any) -> float:
    states = [value for state in optimizer.state.values() for value in state.values()]
    # Look-up tables are shared by all states.
    sizes = {
        tensor.data_ptr(): tensor.nbytes
        for state in states
        for tensor in (state.inner_tensors.values() if isinstance(state, QuantizedTensor) else [state])
    }
    return sum(sizes.values()) / sum(p.numel() for p in model.parameters())


def main(
    arguments: Sequence[str] | None = None, say: Callable[[str], object] = print
) -> dict[str, tuple[float, float]]:
    """Train with each optimizer; (loss, bytes a parameter) by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    steps = 12 if parser.parse_args(arguments).short else 400
    results = {}
    say(f"{'optimizer':30s} {'loss':>8s} {'bytes':>7s} {'ms a step':>10s}")
    for name, make in OPTIMIZERS.items():
        model, optimizer, schedule = start(make, steps)
        loss, seconds = train(model, optimizer, schedule, range(steps))
        results[name] = loss, bytes_a_parameter(model, optimizer)
        say(f"{name:30s} {loss:8.4f} {results[name][1]:7.3f} {1e3 * seconds / steps:10.3f}")

    parts = start(OPTIMIZERS["AdamW8bit"], steps)
    train(*parts, range(steps // 2))
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    parts = start(OPTIMIZERS["AdamW8bit"], steps)
    for part, state in zip(parts, torch.load(file), strict=True):
        part.load_state_dict(state)
    resumed, _ = train(*parts, range(steps // 2, steps))
    of_whole = min(10, steps - steps // 2)
    say(f"saved half way and resumed: {resumed:.4f}, over the last {of_whole} steps")
    results["resumed"] = resumed, results["AdamW8bit"][1]
    return results


if __name__ == "__main__":
    main()
