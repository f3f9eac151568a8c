"""The kernel registry: which implementation runs for an operation on a quantized weight, and why.

Each implementation registers itself, in its own file, with its requirements. `lookup` asks every candidate once per
problem and caches the answer. The reference implementation accepts every problem and has the lowest priority. When only
the reference, or a kernel that emulates instructions which the device lacks, accepts a problem, the registry warns once
per reason, or raises under ``qtorch.config.strict``.
"""

import functools
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ..primitives import QuantSpec, Scheme, is_compiling
from ..primitives.layouts import packed_length
from .config import config, generation
from .custom_ops import note, recording


class QuantizedWeight(Protocol):
    """The attributes of a weight that a kernel may use, besides the inner tensors that its layout names."""

    scheme: Scheme
    act_scale: Tensor | None
    act_zero_point: Tensor | None

    def plain(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(codes, scale, zero_point), unpacked."""


class Problem(NamedTuple):
    """What the choice of a kernel depends on: the operation, the weight's scheme, the input's dtype and device type."""

    op: str
    scheme: Scheme
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, eq=False)
class Kernel:
    """A registered implementation; calling it runs it.

    Attributes:
        name, op: its own name, and the operation it implements (``"linear"``, ``"embedding"``).
        function: takes the operation's arguments with the quantized weight in its place.
        layout: names of the layouts it reads, None for any.
        spec: kind of the weight's spec, None for any: what tells affine codes from those of look-up tables.
        weight: names of the weight dtypes it takes, None for any.
        activation: names of the activation dtypes it takes; empty for weight-only, None for any.
        device: device type, None for any.
        priority: the highest that accepts a problem runs.
        supports: further conditions; returns why not, or None.
        note: what a user should know when it runs (its accuracy, say); shown by `explain`.
        emulates: it computes in floating point, because the device has no instructions for the format. Running it
            counts as a fallback.
        checks_memory: it checks that the memory of the weight's tensors exists on its device. Other kernels run only
            after the caller has checked.
        rotated: it takes weights and activations whose blocks are rotated (see `RotatedSpec`).
        advice: returns what the user could do to make it faster on this machine, or None; reports say it once.
    """

    name: str
    op: str
    function: Callable[..., Tensor]
    layout: Collection[str] | None
    spec: type | None
    weight: Collection[str] | None
    activation: Collection[str] | None
    device: str | None
    priority: int
    supports: Callable[[Problem], str | None] | None
    note: str
    emulates: bool
    checks_memory: bool
    rotated: bool
    advice: Callable[[], str | None] | None

    @property
    def is_reference(self) -> bool:
        return self.priority == REFERENCE

    @functools.cached_property
    def falls_back(self) -> bool:
        """Whether running it is reported as a fallback."""
        return self.is_reference or self.emulates

    def __call__(self, *args: Any) -> Tensor:
        if recording() and not is_compiling():
            note(f"{self.op}:{self.name}")
        return self.function(*args)

    def is_near(self, problem: Problem) -> bool:
        """Whether it reads the weight's layout, on the input's device: its reason to reject is worth a message."""
        reads = self.layout is None or problem.scheme.layout.name in self.layout
        return not self.is_reference and reads and self.device in (None, problem.device)

    def rejects(self, problem: Problem) -> str | None:
        """Why this kernel cannot take the problem; None if it can."""
        scheme = problem.scheme
        if self.layout is not None and scheme.layout.name not in self.layout:
            return f"reads the {_either(self.layout)} layout, the weight has {scheme.layout.name}"
        if self.device not in (None, problem.device):
            return f"runs on {self.device}, the input is on {problem.device}"
        if self.spec is not None and not isinstance(scheme.weight, self.spec):
            return f"takes a {self.spec.__name__}, the weight has a {type(scheme.weight).__name__}"
        if getattr(scheme.weight, "rotation", 0) and not self.rotated:
            return "takes no rotated codes"
        if self.weight is not None and scheme.weight.dtype.name not in self.weight:
            return f"takes {_either(self.weight)} weights, this one is {scheme.weight.dtype.name}"
        if self.activation is not None:
            if not self.activation and scheme.activation is not None:
                return "is weight-only, the scheme quantizes activations"
            if self.activation and scheme.activation is None:
                return "needs quantized activations, the scheme is weight-only"
            if scheme.activation is not None and scheme.activation.dtype.name not in self.activation:
                return f"takes {_either(self.activation)} activations, the scheme has {scheme.activation.dtype.name}"
        return self.supports(problem) if self.supports else None


REFERENCE = -1  # priority of a reference implementation
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
F = TypeVar("F", bound=Callable[..., Tensor])

_kernels: list[Kernel] = []
_chosen: dict[Problem, Kernel] = {}
_reported: set[str | Problem] = set()


class FallbackError(RuntimeError):
    """Raised under ``qtorch.config.strict`` where only the reference implementation, or an emulation, is left."""


def needs_matrix(problem: Problem) -> str | None:
    """A condition for `supports` that most kernels share: the weight is 2-d."""
    shape = problem.scheme.shape
    return None if len(shape) == 2 else f"takes a 2-d weight, this one has shape {shape}"


def needs_floats(problem: Problem) -> str | None:
    """A condition for `supports`: an input in fp32, fp16 or bf16."""
    name = str(problem.dtype).removeprefix("torch.")
    return None if problem.dtype in FLOATS else f"takes fp32, fp16 or bf16 inputs, got {name}"


def needs_rows(problem: Problem) -> str | None:
    """A condition for `supports`: codes that are packed along rows, or not packed."""
    axis = problem.scheme.layout.packed_axis
    return None if axis in (None, -1) else "takes codes packed along rows, this weight is transposed"


def needs_clear_width(problem: Problem) -> str | None:
    """A condition for `supports`: the shape tells unsigned codes with a byte each from packed ones."""
    scheme, kind = problem.scheme, problem.scheme.weight.dtype
    k = scheme.shape[-1]
    unclear = (
        scheme.layout.packed_axis is None and not kind.is_signed and kind.bits < 8 and packed_length(k, kind.bits) == k
    )
    return f"cannot tell {k} codes of {kind} a row from packed ones; pack them" if unclear else None


def register(
    op: str,
    *,
    layout: str | Collection[str] | None = None,
    spec: type | None = QuantSpec,
    weight: Collection[str] | None = None,
    activation: Collection[str] | None = None,
    device: str | None = None,
    priority: int = 0,
    supports: Callable[[Problem], str | None] | None = None,
    note: str = "",
    emulates: bool = False,
    checks_memory: bool = False,
    rotated: bool = False,
    advice: Callable[[], str | None] | None = None,
    name: str | None = None,
) -> Callable[[F], F]:
    """Decorator: register an implementation of `op`; see `Kernel` for the arguments. The name is the function's unless
    given. A single layout may be given by its name alone.

    Raises:
        ValueError: the name is taken for this operation.
    """

    def decorate(function: F) -> F:
        own_name = name or function.__name__
        layouts = (layout,) if isinstance(layout, str) else layout
        conditions = (layouts, spec, weight, activation, device, priority, supports)
        kernel = Kernel(own_name, op, function, *conditions, note, emulates, checks_memory, rotated, advice)
        if f"{op}:{own_name}" in names():
            raise ValueError(f"register: {op} has a kernel named {own_name} already")
        _kernels.append(kernel)
        forget_choices()
        return function

    return decorate


def deregister(op: str, name: str) -> None:
    """Remove a kernel; a `ValueError` if none has that name."""
    found = [k for k in _kernels if k.op == op and k.name == name]
    if not found:
        raise ValueError(f"deregister: {op} has no kernel named {name}")
    _kernels.remove(found[0])
    forget_choices()


def forget_choices() -> None:
    """Clear the cached choices: a kernel was added or removed, or what one supports has changed."""
    _chosen.clear()
    generation.end()


def kernels(op: str) -> list[Kernel]:
    """Every kernel of an operation, the highest priority first."""
    return sorted((k for k in _kernels if k.op == op), key=lambda k: (-k.priority, k.name))


def names() -> list[str]:
    """``"operation:kernel"`` of all kernels."""
    return [f"{kernel.op}:{kernel.name}" for kernel in _kernels]


def advice(used: Collection[str | None]) -> tuple[str, ...]:
    """What the user could do to make the kernels of these names faster on this machine, each advice once."""
    given = (kernel.advice() for kernel in _kernels if kernel.advice and kernel.name in used)
    return tuple(dict.fromkeys(filter(None, given)))


def candidates(problem: Problem) -> list[tuple[Kernel, str | None]]:
    """Every kernel of the operation with why it cannot take the problem (None: it can), best first."""
    return [(kernel, kernel.rejects(problem)) for kernel in kernels(problem.op)]


def choose(problem: Problem) -> Kernel:
    """`lookup` of the best kernel that accepts the problem, with its errors; a fallback is not reported."""
    if known := _chosen.get(problem):
        return known
    accepted = [kernel for kernel, reason in candidates(problem) if reason is None]
    if not accepted:
        raise NotImplementedError(f"no kernel registered for the operation {problem.op!r}")
    best = [k for k in accepted if k.priority == accepted[0].priority]
    if len(best) > 1:
        names = " and ".join(k.name for k in best)
        raise RuntimeError(f"{names} both take {problem.op} on {problem.scheme.spec} with priority {best[0].priority}")
    return _chosen.setdefault(problem, best[0])


def lookup(op: str, scheme: Scheme, dtype: torch.dtype, device: str) -> Kernel:
    """The kernel that runs `op` on a weight of this scheme with an input of this dtype and device type.

    Raises:
        FallbackError: only the reference or an emulation is left, and ``qtorch.config.strict`` is set.
        RuntimeError: two kernels of the same priority accept the problem.
        NotImplementedError: the operation has no kernel at all.
    """
    problem = Problem(op, scheme, dtype, device)
    kernel = choose(problem)
    if kernel.falls_back and (config.strict or problem not in _reported):
        _report_fallback(problem, kernel)
    return kernel


def _report_fallback(problem: Problem, kernel: Kernel) -> None:
    if kernel.is_reference:
        others = [f"{k.name} {reason}" for k, reason in candidates(problem) if k.is_near(problem)]
        reasons = "; ".join(others) or f"no other reads this layout on {problem.device}"
        what = f"the reference implementation, correct but slow: {reasons}"
    else:
        what = f"{kernel.name}, {kernel.note}; qtorch.explain says why no other kernel does"
    message = (
        f"qtorch: {problem.op} on a {problem.device} {str(problem.dtype).removeprefix('torch.')} input with "
        f"{problem.scheme.spec}, layout {problem.scheme.layout} runs {what}"
    )
    if config.strict:
        raise FallbackError(message)
    if message not in _reported:
        warnings.warn(message, stacklevel=5)
    _reported.update((message, problem))


def _either(words: Collection[str]) -> str:
    return " or ".join(sorted(words))


unsafe_view = torch.ops.aten._unsafe_view.default


def to_rows(x: Tensor) -> Tensor:
    """(..., K) -> (M, K)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def from_rows(y: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """(M, N) -> (..., N) with the leading axes of `x`, and the bias (N) added."""
    if bias is not None:
        y = y + bias
    return fresh(y) if x.dim() == 2 else unsafe_view(y, (*x.shape[:-1], y.shape[-1]))


def split_bias(bias: Tensor | None, x: Tensor, n: int) -> tuple[Tensor | None, Tensor | None]:
    """(bias that the kernel adds, bias that the caller adds afterwards); one of the two is None. A bias of another
    dtype is added afterwards, with torch's type promotion."""
    return (bias, None) if bias is not None and can_add(bias, x.dtype, n) else (None, bias)


def can_add(bias: Tensor, dtype: torch.dtype, n: int) -> bool:
    """Whether kernels, which read a vector, can add the bias to a result of this dtype with n columns."""
    return bias.dtype == dtype and bias.shape == (n,) and bias.is_contiguous() and not bias.is_neg()


def fresh(y: Tensor) -> Tensor:
    """`y`, whose memory nobody else reads, as a tensor that is no view to autograd, without a copy. Autograd refuses to
    change the views that a `Function` returns, and those made without gradients, in place."""
    return unsafe_view(y, y.shape) if is_compiling() or y._is_view() else y


def power_if_larger(rows: Tensor, limit: float, power: float) -> Tensor:
    """(M, 1) in the dtype of `rows` (M, K): `power` for those with a number above `limit`, 1 for all others."""
    highest = rows.amax(1, keepdim=True) if rows.shape[1] else rows.new_zeros(rows.shape[0], 1)
    return torch.ones_like(highest).masked_fill(highest > limit, power)


def scale_per_row(scale: Tensor, rows: int) -> Tensor:
    """A scale, or zero point, (R, G) of R equal blocks of `rows` rows, one block for a scale per tensor: (rows, G)."""
    if scale.shape[0] == rows:
        return scale
    return scale.expand(rows, -1) if scale.shape[0] == 1 else scale.repeat_interleave(rows // scale.shape[0], 0)
