"""Steps of a `Plan`, and the memory in which they work.

A `Workspace` serves inputs of one shape: it holds the codes and reals that steps hand to each other, and the bytes of
their calls, made at the first run. What leaves the fused part is in memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn

from ..kernels.cpu.compiled_library import TYPES, Library, threads
from ..kernels.cpu.conv_codes import Border, CodesForm, quantize_images
from ..kernels.cpu.conv_structs import ConvCall, ConvFinish, ConvPoolCall
from ..kernels.cpu.conv_weight import CompiledConv, shape_of
from ..kernels.cpu.structs import Quantizer, pack
from ..kernels.custom_ops import note, recording
from ..kernels.im2col import Window
from ..kernels.image_conv import result_shape
from .chains import Chain, Numerics

CodesKey = tuple[fx.Node, Numerics]


class NotFinite(Exception):
    """There is a NaN or an infinity among numbers that become codes, which cannot stand for it."""


class Held(NamedTuple):
    """Codes in a workspace."""

    codes: Tensor
    form: CodesForm


class Workspace:
    """Attributes:
    codes, reals: by value, what is handed from step to step.
    calls: by step, what it has prepared.
    """

    def __init__(self, library: Library, channels_last: bool) -> None:
        self.library = library
        self.channels_last = channels_last
        self.codes: dict[CodesKey, Held] = {}
        self.reals: dict[fx.Node, Tensor] = {}
        self.calls: dict[Any, Any] = {}


class Run(NamedTuple):
    """One run.

    Attributes:
        values: what plain operations read, by node.
    """

    workspace: Workspace
    values: dict[fx.Node, Any]
    modules: Mapping[str, Any]


class Step(Protocol):
    """One step."""

    def run(self, run: Run) -> None: ...


class PlainStep:
    """A node as it is."""

    def __init__(self, node: fx.Node, modules: Mapping[str, Any]) -> None:
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
            found: Any = run.modules[""]
            for name in str(node.target).split("."):
                found = getattr(found, name)
            values[node] = found


class EncodeStep:
    """The codes of a value in floating point."""

    def __init__(self, node: fx.Node, numerics: Numerics, border: Border) -> None:
        self.node, self.numerics, self.border = node, numerics, border
        scale, zero, low, high, self.shift, _ = numerics
        self.scale = torch.tensor([scale], dtype=torch.float32)
        self.zero = torch.tensor([zero], dtype=torch.int32)
        self.quantizer = Quantizer(low, high, 0, 1, 0.0, 0.0)

    def run(self, run: Run) -> None:
        work = run.workspace
        x = work.reals.get(self.node)
        x = run.values[self.node] if x is None else x
        key = (self.node, self.numerics)
        held = work.codes.get(key)
        if held is None:
            images, channels, height, width = x.shape
            form = CodesForm(images, channels, height, width, self.numerics.groups, self.border)
            held = work.codes[key] = Held(torch.empty(form.nbytes, dtype=torch.uint8), form)
        args = held.form, self.quantizer, self.shift, self.scale, self.zero, held.codes
        if quantize_images(work.library, x, *args)[1]:
            raise NotFinite


class ConvStep:
    """A chain.

    Attributes:
        written: how the result is quantized, None for no codes.
        border: of these codes.
        real: whether fused steps read the result as reals.
        plain: whether plain operations read it.
    """

    def __init__(self, chain: Chain, written: Numerics | None, border: Border, real: bool, plain: bool) -> None:
        self.chain, self.written, self.border, self.real, self.plain = chain, written, border, real, plain

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
                finish = finish._replace(other=other.data_ptr())
            if not self.real and self.plain:
                shape = call.shape
                sizes = shape.images, shape.groups * shape.features, shape.out_h, shape.out_w
                y = _empty_images(sizes, work.channels_last)
                run.values[chain.last] = y
                finish = finish._replace(out=y.data_ptr())
            fixed = pack(call._replace(finish=finish))
        work.library.conv(fixed)
        if self.real and self.plain:
            run.values[chain.last] = _copy(work.reals[chain.last], work.channels_last)

    def _prepare(self, run: Run) -> tuple[ConvCall, bytes | None]:
        """The call, and its bytes where they are the same on each run."""
        chain, work = self.chain, run.workspace
        held = work.codes[chain.source, chain.numerics]
        form, window = held.form, chain.window
        conv: nn.Conv2d = run.modules[chain.name]
        layer = packed_conv(conv)
        scale = torch.tensor([chain.numerics.scale], dtype=torch.float32)
        zero = torch.tensor([chain.numerics.zero], dtype=torch.int32)
        like = torch.empty(form.images, form.channels, form.height, form.width, device="meta")
        _, features, height, width = result_shape(like, conv.out_channels, window)
        out = 0
        if self.real:
            real = _empty_images((form.images, features, height, width), True)
            work.reals[chain.last] = real
            out = real.data_ptr()
        codes, of_codes = 0, CodesForm(0, 0, 0, 0, 1, (0, 0))
        to = self.written or chain.numerics
        if self.written is not None:
            of_codes = CodesForm(form.images, features, height, width, 1, self.border)
            made = torch.full((of_codes.nbytes,), to.zero + to.shift, dtype=torch.uint8)
            work.codes[chain.last, to] = Held(made, of_codes)
            codes = made.data_ptr() + of_codes.first()
        other = 0
        if chain.other is not None and chain.other in work.reals:
            other = work.reals[chain.other].data_ptr()
        bias = conv.bias
        call = ConvCall(
            shape_of(form.images, form.channels, features, window, (height, width)),
            form.images_at(held.codes.data_ptr(), window.padding),  # type: ignore[arg-type]
            layer.packed.data_ptr(),
            ConvFinish(
                scale=layer.scale.data_ptr(),
                sums=layer.sums.data_ptr(),
                shift=chain.numerics.shift,
                x_scale=scale.data_ptr(),
                x_zero=zero.data_ptr(),
                per_image=0,
                bias=0 if bias is None else bias.data_ptr(),
                out=out,
                type=TYPES[torch.float32],
                channels_last=self.real or work.channels_last,
                other=other,
                low=chain.low,
                high=chain.high,
                codes=codes,
                code_image=of_codes.image,
                code_row=of_codes.row,
                code_pixel=of_codes.pixel,
                code_scale=to.scale,
                code_zero=to.zero + to.shift,
                code_low=to.low + to.shift,
                code_high=to.high + to.shift,
            ),
            threads(),
        )
        # The addresses above are those of these tensors.
        work.calls[self, "tensors"] = layer, scale, zero, bias
        changes = (chain.other is not None and not other) or (self.plain and not self.real)
        return call, None if changes else pack(call)


class PoolStep:
    """`nn.MaxPool2d` of the result of a chain."""

    def __init__(self, node: fx.Node, module: nn.MaxPool2d, plain: bool) -> None:
        self.node, self.plain = node, plain
        (self.source,) = node.all_input_nodes
        kernel, stride, padding = (_pair(v) for v in (module.kernel_size, module.stride, module.padding))
        self.window = Window(kernel, stride, padding, (1, 1), 1)

    def run(self, run: Run) -> None:
        work = run.workspace
        call = work.calls.get(self)
        if call is None:
            x = work.reals[self.source]
            images, channels, height, width = x.shape
            _, _, *out = result_shape(x, channels, self.window)
            real = work.reals[self.node] = _empty_images((images, channels, *out), True)
            (kh, kw), (sh, sw), (ph, pw) = self.window[:3]
            sizes = images, channels, height, width, out[0], out[1], kh, kw, sh, sw, ph, pw
            call = work.calls[self] = pack(ConvPoolCall(x.data_ptr(), real.data_ptr(), *sizes, threads()))
        work.library.conv_pool(call)
        if self.plain:
            run.values[self.node] = _copy(work.reals[self.node], work.channels_last)


def packed_conv(conv: nn.Conv2d) -> CompiledConv:
    """The weight of a convolution as the kernels read it.

    Raises:
        RuntimeError: they do not.
    """
    weight: Any = conv.weight
    scheme = weight.scheme
    about = (*scheme.codes_shape, scheme.weight.dtype.name, False, "INT", 0.0, tuple(scheme.shape), conv.groups)
    layer = CompiledConv.of(weight.qdata, weight.scale, None, *about)
    if layer.compiled is None:
        raise RuntimeError("fuse_convolutions: the compiled kernels do not read the tensors of a weight")
    return layer


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _empty_images(shape: tuple[int, ...], channels_last: bool) -> Tensor:
    images, channels, height, width = shape
    if channels_last:
        return torch.empty(images, height, width, channels).permute(0, 3, 1, 2)
    return torch.empty(shape)


def _copy(x: Tensor, channels_last: bool) -> Tensor:
    return x.clone(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
