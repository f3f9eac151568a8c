"""Steps of a `Plan`, and the memory in which they work.

A `Workspace` serves inputs of one shape: it holds the codes and reals that steps hand to each other, and the bytes of
their calls, made at the first run. What leaves the fused part is in memory of its own.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ...kernels.conv import Window, result_shape
from ...kernels.cpu.compiled_library import TYPES, Library, threads
from ...kernels.cpu.conv_codes import Border, CodesForm, ConvCall, ConvFinish, ConvPoolCall, quantize_images
from ...kernels.cpu.conv_prepared import CompiledConv, shape_of
from ...kernels.cpu.memory import address, empty
from ...kernels.cpu.structs import pack
from ...kernels.custom_ops import note, recording
from .chains import Chain, Numerics


class NotFinite(Exception):
    """There is a NaN or an infinity among numbers that become codes, which cannot stand for it."""


class Codes(NamedTuple):
    """Codes in a workspace, with their scale and zero point: one element each, or one for each image."""

    codes: Tensor
    form: CodesForm
    scale: Tensor
    zero: Tensor

    @classmethod
    def of(cls, form: CodesForm, numerics: Numerics) -> Codes:
        """Codes of zeros."""
        count = 1 if numerics.static else form.images
        return cls(
            torch.full((form.nbytes,), numerics.zero + numerics.shift, dtype=torch.uint8, device="cpu"),
            form,
            torch.full((count,), numerics.scale, dtype=torch.float32, device="cpu"),
            torch.full((count,), numerics.zero, dtype=torch.int32, device="cpu"),
        )


class Workspace:
    """What is handed from step to step by value, codes and reals, and what each step has prepared."""

    def __init__(self, library: Library, channels_last: bool) -> None:
        self.library, self.channels_last = library, channels_last
        self.codes: dict[tuple[fx.Node, Numerics], Codes] = {}
        self.reals: dict[fx.Node, Tensor] = {}
        self.calls: dict[Any, Any] = {}
        self._free: list[Tensor] = []
        self._used: dict[fx.Node, Tensor] = {}

    def new_real(self, node: fx.Node, shape: Sequence[int]) -> Tensor:
        """Memory for a value, (B, C, H, W) channels last: that of values which are read no more, if there is any."""
        images, channels, height, width = shape
        size = images * channels * height * width
        fits = [memory for memory in self._free if memory.numel() >= size]
        memory = min(fits, key=Tensor.numel) if fits else empty((size,), torch.float32)
        self._free = [m for m in self._free if m is not memory]
        self._used[node] = memory
        real = self.reals[node] = memory[:size].view(images, height, width, channels).permute(0, 3, 1, 2)
        return real

    def release(self, nodes: Sequence[fx.Node]) -> None:
        """These values are read no more."""
        self._free += [self._used.pop(node) for node in nodes if node in self._used]


class Run(NamedTuple):
    """One run; `values` has what plain operations read, by node."""

    workspace: Workspace
    values: dict[fx.Node, Any]
    modules: Mapping[str, Any]


class Step(ABC):
    """One step, which `reads` values as reals in the memory of fused steps."""

    reads: tuple[fx.Node, ...] = ()

    @abstractmethod
    def run(self, run: Run) -> None:
        """Do it."""


class PlainStep(Step):
    """A node as it is."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node

    def run(self, run: Run) -> None:
        node, values = self.node, run.values
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "call_module":
            values[node] = run.modules[str(node.target)](*args, **kwargs)
        elif node.op == "call_function":
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        elif node.op == "call_method":
            values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            values[node] = operator.attrgetter(str(node.target))(run.modules[""])


class EncodeStep(Step):
    """The codes of a value in floating point."""

    def __init__(self, node: fx.Node, numerics: Numerics, border: Border) -> None:
        self.node, self.numerics, self.border, self.reads = node, numerics, border, (node,)

    def run(self, run: Run) -> None:
        work = run.workspace
        x = work.reals.get(self.node)
        x = run.values[self.node] if x is None else x
        key = (self.node, self.numerics)
        source = work.codes.get(key)
        if source is None:
            images, channels, height, width = x.shape
            form = CodesForm(images, channels, height, width, self.numerics.groups, self.border)
            source = work.codes[key] = Codes.of(form, self.numerics)
        about = self.numerics.quantizer, self.numerics.shift
        if quantize_images(work.library, x, source.form, *about, source.scale, source.zero, source.codes)[1]:
            raise NotFinite


class ConvStep(Step):
    """A chain, whose result is `written` as codes with a border, or read as reals by fused steps or `plain` ones."""

    def __init__(self, chain: Chain, written: Numerics | None, border: Border, real: bool, plain: bool) -> None:
        self.chain, self.written, self.border, self.real, self.plain = chain, written, border, real, plain
        self.reads = (chain.last,) if chain.other is None else (chain.other, chain.last)

    def run(self, run: Run) -> None:
        chain, work = self.chain, run.workspace
        prepared = work.calls.get(self)
        if prepared is None:
            prepared = work.calls[self] = self._prepare(run)
        call, fixed = prepared
        if recording():
            note(f"fused_conv.{work.library.instruction_set}")
        if fixed is None:
            finish = call.finish
            if chain.other is not None and chain.other not in work.reals:
                # Kept until the call is over.
                other = run.values[chain.other].contiguous(memory_format=torch.channels_last)
                finish = finish._replace(other=address(other, torch.float32))
            if not self.real and self.plain:
                shape = call.shape
                sizes = shape.images, shape.groups * shape.features, shape.out_h, shape.out_w
                y = _empty_images(sizes, work.channels_last)
                run.values[chain.last] = y
                finish = finish._replace(out=address(y, torch.float32))
            fixed = pack(call._replace(finish=finish))
        work.library.conv(fixed)
        if self.real and self.plain:
            run.values[chain.last] = _copy(work.reals[chain.last], work.channels_last)

    def _prepare(self, run: Run) -> tuple[Any, bytes | None]:
        """The call, and its bytes where they are the same on each run."""
        chain, work = self.chain, run.workspace
        source = work.codes[chain.source, chain.numerics]
        form, window = source.form, chain.window
        conv: nn.Conv2d = run.modules[chain.name]
        layer = _packed(conv)
        like = torch.empty(form.images, form.channels, form.height, form.width, device="meta", dtype=torch.float32)
        _, features, height, width = result_shape(like, conv.out_channels, window)
        out = 0
        if self.real:
            out = address(work.new_real(chain.last, (form.images, features, height, width)))
        codes, of_codes = 0, CodesForm(0, 0, 0, 0, 1, (0, 0))
        to = self.written or chain.numerics
        if self.written is not None:
            of_codes = CodesForm(form.images, features, height, width, 1, self.border)
            made = work.codes[chain.last, to] = Codes.of(of_codes, to)
            codes = address(made.codes, torch.uint8) + of_codes.first()
        other = 0
        if chain.other is not None and chain.other in work.reals:
            other = address(work.reals[chain.other], torch.float32)
        bias = conv.bias
        call = ConvCall(
            shape_of(form.images, form.channels, features, window, (height, width)),
            form.images_at(address(source.codes, torch.uint8), window.padding),  # type: ignore[arg-type]
            address(layer.packed, torch.int8),
            ConvFinish(
                scale=address(layer.scale, torch.float32), sums=address(layer.sums, torch.int32),
                shift=chain.numerics.shift, x_scale=address(source.scale, torch.float32),
                x_zero=address(source.zero, torch.int32), per_image=not chain.numerics.static, bias=address(bias),
                out=out, type=TYPES[torch.float32], channels_last=self.real or work.channels_last, other=other,
                low=chain.low, high=chain.high, codes=codes, code_image=of_codes.strides[0],
                code_row=of_codes.strides[1], code_pixel=of_codes.strides[2], code_scale=to.scale,
                code_zero=to.zero + to.shift, code_low=to.quantizer.low + to.shift,
                code_high=to.quantizer.high + to.shift,
            ),
            threads(),
        )  # fmt: skip
        work.calls[self, "tensors"] = layer, bias  # whose addresses the call has
        changes = (chain.other is not None and not other) or (self.plain and not self.real)
        return call, None if changes else pack(call)


class PoolStep(Step):
    """`nn.MaxPool2d` of the result of a chain."""

    def __init__(self, node: fx.Node, module: nn.MaxPool2d, plain: bool) -> None:
        self.node, self.plain = node, plain
        (self.source,) = node.all_input_nodes
        self.reads = self.source, node
        kernel, stride, padding = (as_pair(v) for v in (module.kernel_size, module.stride, module.padding))
        self.window = Window(kernel, stride, padding, (1, 1), 1)

    def run(self, run: Run) -> None:
        work = run.workspace
        call = work.calls.get(self)
        if call is None:
            x = work.reals[self.source]
            images, channels, height, width = x.shape
            _, _, *out = result_shape(x, channels, self.window)
            real = work.new_real(self.node, (images, channels, *out))
            (kh, kw), (sh, sw), (ph, pw) = self.window[:3]
            sizes = images, channels, height, width, out[0], out[1], kh, kw, sh, sw, ph, pw
            call = work.calls[self] = pack(ConvPoolCall(address(x), address(real), *sizes, threads()))
        work.library.conv_pool(call)
        if self.plain:
            run.values[self.node] = _copy(work.reals[self.node], work.channels_last)


def _packed(conv: nn.Conv2d) -> CompiledConv:
    """The weight of a convolution as the kernels read it."""
    weight: Any = conv.weight
    scheme = weight.scheme
    about = (*scheme.codes_shape, scheme.weight.dtype.name, False, "INT", 0.0, tuple(scheme.shape), conv.groups)
    layer = CompiledConv.of(weight.qdata, weight.scale, None, *about)
    if layer.compiled is None:
        raise RuntimeError("fuse_convolutions: the compiled kernels do not read the tensors of a weight")
    return layer


def as_pair(value: Any) -> tuple[int, int]:
    """One number for both axes, or one for each."""
    return (value, value) if isinstance(value, int) else tuple(value)


def _empty_images(shape: tuple[int, ...], channels_last: bool) -> Tensor:
    images, channels, height, width = shape
    if channels_last:
        return empty((images, height, width, channels), torch.float32).permute(0, 3, 1, 2)
    return empty(shape, torch.float32)


def _copy(x: Tensor, channels_last: bool) -> Tensor:
    return x.clone(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
