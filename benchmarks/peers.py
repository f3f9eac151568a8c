"""Quantized linear layers of other engines, for `bench_cpu_linear --peers`: onnxruntime, OpenVINO and torchao.

A peer is measured on what users of the engine run: a graph of one product, symmetric weights rounded to nearest, with
scales by row or group, and inputs and outputs that lie in torch's memory. `pip install --target DIR --no-deps PACKAGE`
and PYTHONPATH bring an engine without touching the environment.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Layer = Callable[[Tensor], Callable[[], Tensor]]
"""Takes the input x (M, K), and returns what multiplies it with the weight on each call."""

FLOATING = 32
"""Bits of an activation in floating point of any dtype."""

ROW = 1 << 30
"""Size of a group that is a whole row."""


class Precision(NamedTuple):
    """Bits of the weight's codes, columns that share a scale, and bits of the activation."""

    weight: int
    group: int
    activation: int

    def covers(self, other: Precision) -> bool:
        """Whether `other` is of equal or lower precision: weights of as many bits in groups at least as large, and
        activations of as many bits or fewer. (A 4-bit weight is no peer of an 8-bit one: it is half the memory.)"""
        same = self.weight == other.weight
        return same and self.group <= other.group and self.activation >= other.activation


@dataclass(frozen=True)
class Peer:
    """A layer of another engine.

    Attributes:
        name: engine and format.
        package: what has to be importable.
        precision: of its product.
        dtypes: of the activations that it takes.
        build: makes layers from a weight (N, K) in the activation's dtype, and their number; each has a weight of its
            own in memory.
    """

    name: str
    package: str
    precision: Precision
    dtypes: tuple[torch.dtype, ...]
    build: Callable[[Tensor, int], list[Layer]]

    @property
    def importable(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def quantize(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """(codes (N, G, K / G) int8, scale (N, G, 1) fp32), symmetric, rounded to nearest."""
    n, k = weight.shape
    blocks = weight.float().view(n, -1, min(group, k))
    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (blocks / scale).round().to(torch.int8), scale


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the low half."""
    return ((codes[..., 0::2] & 15) | ((codes[..., 1::2] & 15) << 4)).to(torch.uint8)


# ------------------------------------------------------------------------------------------ onnxruntime


_sharing: list[bool] = []


def share_threads() -> None:
    """Give all sessions of onnxruntime in this process, of others too, one pool of as many threads as torch has: pools
    of their own would disturb each other."""
    import onnxruntime

    onnxruntime.set_global_thread_pool_sizes(torch.get_num_threads(), 1)
    _sharing.append(True)


def _sessions(node: Any, constants: dict[str, Any], n: int, k: int, count: int) -> list[Layer]:
    """Layers that run a graph of one node from x (M, K) to y (M, N), fp32."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    shapes = {"x": ["m", k], "y": ["m", n]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    constant = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph([node], "linear", [values["x"]], [values["y"]], constant)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = not _sharing
    if not _sharing:
        options.intra_op_num_threads = torch.get_num_threads()

    def layer(session: Any, x: Tensor) -> Callable[[], Tensor]:
        y, binding = torch.empty(len(x), n), session.io_binding()
        for bind, name, value in ((binding.bind_input, "x", x), (binding.bind_output, "y", y)):
            bind(name, "cpu", 0, "float32", list(value.shape), value.data_ptr())

        def call() -> Tensor:
            session.run_with_iobinding(binding)
            return y

        return call

    providers = ["CPUExecutionProvider"]
    made = [onnxruntime.InferenceSession(model, options, providers=providers) for _ in range(count)]
    return [functools.partial(layer, session) for session in made]


def _matmul_nbits(weight: Tensor, count: int, group: int, accuracy_level: int) -> list[Layer]:
    """`MatMulNBits`; at accuracy level 4 it quantizes the input to 8 bits, at 0 it computes in fp32."""
    from onnx import helper

    n, k = weight.shape
    codes, scale = quantize(weight, 4, group)
    constants = {"codes": pack_nibbles(codes + 8).numpy(), "scale": scale.flatten(1).contiguous().numpy()}
    numbers = {"K": k, "N": n, "bits": 4, "block_size": group, "accuracy_level": accuracy_level}
    node = helper.make_node("MatMulNBits", ["x", *constants], ["y"], domain="com.microsoft", **numbers)
    return _sessions(node, constants, n, k, count)


def _dynamic_quantize_matmul(weight: Tensor, count: int) -> list[Layer]:
    """`DynamicQuantizeMatMul`: one scale for the input, one for each row of the weight. It is what onnxruntime makes of
    `MatMulInteger` in the models of its `quantize_dynamic`."""
    from onnx import helper

    codes, scale = quantize(weight, 8, ROW)
    constants = {"codes": codes.flatten(1).t().contiguous().numpy(), "scale": scale.flatten().numpy()}
    node = helper.make_node("DynamicQuantizeMatMul", ["x", *constants], ["y"], domain="com.microsoft")
    return _sessions(node, constants, *weight.shape, count)


# --------------------------------------------------------------------------------------------- OpenVINO


def _openvino(weight: Tensor, count: int, bits: int, group: int, dynamic: int) -> list[Layer]:
    """A product with compressed weights; with `dynamic` the input is quantized to 8 bits in groups of that size."""
    import openvino
    from openvino import opset13 as ops

    n, k = weight.shape
    half = weight.dtype == torch.bfloat16
    codes, scale = quantize(weight, bits, group)
    stored = pack_nibbles(codes) if bits == 4 else codes
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": dynamic,
        "INFERENCE_PRECISION_HINT": "bf16" if half else "f32",
    }
    core, io_type = openvino.Core(), openvino.Type.bf16 if half else openvino.Type.f32

    def memory(tensor: Tensor) -> Any:
        """The same memory, for OpenVINO; numpy has no bf16."""
        numbers = (tensor.view(torch.int16) if half else tensor).numpy()
        return openvino.Tensor(numbers, openvino.Shape(tensor.shape), io_type)

    def make() -> Layer:
        kept = stored.clone().numpy()  # the model reads this memory
        kind = openvino.Type.i4 if bits == 4 else openvino.Type.i8
        constant = ops.constant(openvino.Tensor(kept, openvino.Shape(codes.shape), kind))
        floats = ops.multiply(ops.convert(constant, "f32"), ops.constant(scale.numpy()))
        floats = ops.reshape(floats, ops.constant([n, k]), False)
        x = ops.parameter([-1, k], io_type)
        y = ops.convert(ops.matmul(ops.convert(x, "f32"), floats, False, True), io_type.to_string())
        compiled = core.compile_model(openvino.Model([y], [x]), "CPU", options)
        request = compiled.create_infer_request()

        def layer(x: Tensor) -> Callable[[], Tensor]:
            y = x.new_empty(len(x), n)
            given, taken = memory(x), memory(y)

            def call() -> Tensor:
                request.set_input_tensor(given)
                request.set_output_tensor(taken)
                request.infer()
                return y

            call.kept = kept, x  # type: ignore[attr-defined]
            return call

        return layer

    return [make() for _ in range(count)]


# ---------------------------------------------------------------------------------------------- torchao


def _torchao(weight: Tensor, count: int, config: str, **arguments: Any) -> list[Layer]:
    from torchao import quantization

    def make() -> Layer:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
        model = nn.Sequential(linear)
        quantization.quantize_(model, getattr(quantization, config)(**arguments))
        return lambda x: functools.partial(model, x)

    return [make() for _ in range(count)]


def _torchao_int4(weight: Tensor, count: int, group: int) -> list[Layer]:
    """torchao 0.18 has no other 4-bit layer that runs on an x86 processor; its codes are stored in bytes."""
    from torchao.quantization import PerGroup

    arguments = {"weight_dtype": torch.int4, "granularity": PerGroup(group)}
    return _torchao(weight, count, "IntxWeightOnlyConfig", **arguments)


# ------------------------------------------------------------------------------------------ all of them

_FP32, _BOTH = (torch.float32,), (torch.float32, torch.bfloat16)
_GROUPS = (32, 128)


def _of_onnxruntime() -> list[Peer]:
    def peer(name: str, precision: Precision, build: Callable[[Tensor, int], list[Layer]]) -> Peer:
        return Peer(f"onnxruntime {name}", "onnxruntime", precision, _FP32, build)

    made = [peer("int8, A8", Precision(8, ROW, 8), _dynamic_quantize_matmul)]
    for group in _GROUPS:
        for level, bits, suffix in ((0, FLOATING, ""), (4, 8, ", A8")):
            build = functools.partial(_matmul_nbits, group=group, accuracy_level=level)
            made.append(peer(f"int4 g{group}{suffix}", Precision(4, group, bits), build))
    return made


def _of_openvino() -> list[Peer]:
    made = []
    for bits, group, name in ((8, ROW, "int8"), *((4, group, f"int4 g{group}") for group in _GROUPS)):
        for dynamic, of_input, suffix in ((0, FLOATING, ""), (min(group, 128), 8, ", A8")):
            build = functools.partial(_openvino, bits=bits, group=group, dynamic=dynamic)
            precision = Precision(bits, group, of_input)
            made.append(Peer(f"OpenVINO {name}{suffix}", "openvino", precision, _BOTH, build))
    return made


def _of_torchao() -> list[Peer]:
    int8 = functools.partial(_torchao, config="Int8WeightOnlyConfig")
    dynamic = functools.partial(_torchao, config="Int8DynamicActivationInt8WeightConfig")
    made = [
        Peer("torchao int8", "torchao", Precision(8, ROW, FLOATING), _BOTH, int8),
        Peer("torchao int8, A8", "torchao", Precision(8, ROW, 8), _BOTH, dynamic),
    ]
    int4 = functools.partial(_torchao_int4, group=128)  # slow; the groups of 32 are slower
    return [*made, Peer("torchao int4 g128", "torchao", Precision(4, 128, FLOATING), _BOTH, int4)]


PEERS: dict[str, Peer] = {peer.name: peer for peer in (*_of_onnxruntime(), *_of_openvino(), *_of_torchao())}
"""Every peer by its name."""


def found(dtype: torch.dtype) -> list[Peer]:
    """Those that can be imported here and take activations of this dtype."""
    return [peer for peer in PEERS.values() if peer.importable and dtype in peer.dtypes]
