"""save_in_codes: what the backward needs of the activations is kept in codes.

Autograd keeps the inputs and results of operators until the backward. Here each is quantized when it is saved, in
groups of elements as they lie in memory, and comes back in its dtype when a gradient is computed from it: int8 takes
1.06 bytes of an element, in place of 2 or 4. The forward is not changed; gradients are those of rounded activations,

    y = f(x),    dx = f'(x_hat) g,    dw = g^T x_hat

(ActNN, Chen et al., arXiv 2104.14129, section 3; GACT, Liu et al., arXiv 2206.11357; JetFire, arXiv 2403.12422, keeps
the activations between layers so).
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels.ops import quantize
from ..primitives import PerGroup, PerRow, QuantSpec, is_compiling, qdtype
from ..primitives.layouts import can_pack_bits, pack_codes, unpack_codes

LEAST = 4096
"""Elements below which a tensor is kept as it is."""

EXACT = ("LogSoftmaxBackward0", "LogcumsumexpBackward0")
"""Functions whose results are exponents in the backward, where a rounding error is multiplied."""

FORMS = ("ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Unsqueeze", "Slice")
"""Functions that give a parameter another form: autocast copies weights, products of matrices transpose them."""

INT8 = QuantSpec(qdtype("int8"), PerGroup(64), scale_dtype=torch.float32)


class Codes:
    """Codes (groups, group_size) of a piece of memory, shared by all operators that have saved it."""

    def __init__(self, values: Tensor, spec: QuantSpec, size: int) -> None:
        padded = torch.nn.functional.pad(values, (0, -len(values) % size)).view(-1, size)
        # As long as there is a reference, no other storage has this address.
        self.memory = StorageWeakRef(values.untyped_storage())
        codes, self.scale, self.zero_point = quantize.quantize_dynamic(padded, spec)
        self.codes = pack_codes(codes, spec.dtype) if can_pack_bits(spec.dtype) else codes

    def values(self, spec: QuantSpec, dtype: torch.dtype, size: int) -> Tensor:
        codes = unpack_codes(self.codes, spec.dtype, size) if can_pack_bits(spec.dtype) else self.codes
        return quantize.dequantize_rows(spec, codes, self.scale, self.zero_point, dtype).view(-1)


class Saved(NamedTuple):
    """A tensor of this form that lies in the memory of `codes`."""

    codes: Codes
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class save_in_codes(torch.autograd.graph.saved_tensors_hooks):
    """A context for the forward, in which what is saved for the backward is kept in codes.

    Example::

        with save_in_codes():
            loss = model(inputs).loss
        loss.backward()

    Kept as they are: parameters, their views and copies in other dtypes, inputs and whatever else needs no gradient
    (masks, statistics of attention and norms), inputs with a learned step, results of log_softmax, and tensors below
    4096 elements. A tensor that
    several operators save, in whatever shape, is quantized once. Inside of a compiled function, what the compiler saves
    is kept as well: compile the parts between which tensors are to be kept in codes. A tensor that is changed in place
    afterwards keeps the codes of what was saved, where autograd would raise an error.

    Args:
        spec: of the codes, with `PerGroup`: its groups follow the memory. Gradients of weights are unbiased with
            ``rounding=Rounding.STOCHASTIC`` where the range of the codes is that of the values (symmetric, or
            ``ZeroPointDomain.OFFSET``); codes of 4 bits need it.

    Raises:
        TypeError: `spec` is no `QuantSpec`.
        ValueError: other blocks than groups, or scales that are quantized themselves.
    """

    def __init__(self, spec: QuantSpec = INT8) -> None:
        if not isinstance(spec, QuantSpec):
            raise TypeError(f"save_in_codes: spec is a QuantSpec, got {spec!r:.80}")
        if not isinstance(spec.granularity, PerGroup) or spec.granularity.group_size < 1 or spec.scale_spec is not None:
            raise ValueError(f"save_in_codes: the spec has PerGroup(group_size) and plain scales, got {spec}")
        self.size = spec.granularity.group_size
        self.spec = spec.with_granularity(PerRow())
        self.known: weakref.WeakValueDictionary[tuple[object, ...], Codes] = weakref.WeakValueDictionary()
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | Saved:
        if (
            is_compiling()
            or type(tensor) is not Tensor
            or tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16)
            or tensor.numel() < LEAST
            or type(tensor.grad_fn).__name__ in EXACT
            or _is_leaf(tensor)
        ):
            return tensor
        own = tensor.detach()
        own = own if _is_dense(own) else own.contiguous()
        place = own.untyped_storage()._cdata, own.storage_offset(), own.numel(), own.dtype, tensor._version
        codes = self.known.get(place)
        if codes is None:
            codes = self.known[place] = Codes(own.as_strided((own.numel(),), (1,)), self.spec, self.size)
        return Saved(codes, own.shape, own.stride(), own.dtype)

    def _unpack(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return saved.codes.values(self.spec, saved.dtype, self.size).as_strided(saved.shape, saved.stride)


def _is_leaf(tensor: Tensor) -> bool:
    """Whether it needs no gradient, or is a parameter in whatever form."""
    function = tensor.grad_fn
    while type(function).__name__.removesuffix("Backward0") in FORMS:
        function = function.next_functions[0][0]  # type: ignore[union-attr]
    return function is None or type(function).__name__ == "AccumulateGrad"


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory, each with a place of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
