"""FusionReport: what `fuse_convolutions` did with each convolution, or why it did nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedConvolution:
    """One convolution that runs on codes.

    Attributes:
        name: of the module.
        steps: what follows the sums, in one pass: ``("bias", "add", "relu")``.
        result: ``"codes"``, ``"floats"`` or ``"codes and floats"``.
    """

    name: str
    steps: tuple[str, ...]
    result: str


@dataclass(frozen=True)
class FusionReport:
    """Attributes:
    fused: the convolutions that run on codes, in order.
    skipped: (name, reason) of those that run as before.
    exact: whether the outputs for the example inputs are those of the unfused model, bit for bit.
    """

    fused: tuple[FusedConvolution, ...]
    skipped: tuple[tuple[str, str], ...]
    exact: bool

    def __str__(self) -> str:
        count = len(self.fused) + len(self.skipped)
        equal = "equal to those of the unfused model bit for bit" if self.exact else "not equal to the unfused model's"
        lines = [f"{len(self.fused)} of {count} convolutions run on codes; outputs are {equal}"]
        lines += [f"  {f.name}: {' + '.join(('conv', *f.steps))}, gives {f.result}" for f in self.fused]
        lines += [f"  {name}: not fused: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)
