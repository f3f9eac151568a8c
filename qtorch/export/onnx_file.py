"""`onnx`: a quantized model as an ONNX program, whose weights are integers of 4 or 8 bits in the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .onnx_graph import Weights
from .onnx_translations import onnx_translations
from .portable import is_portable, portable, schemes_of

if TYPE_CHECKING:
    from torch.onnx import ONNXProgram

OPSET = 21


def onnx(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    path: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    activations: str = "integer",
    opset_version: int = OPSET,
    external_data: bool | None = None,
    **options: Any,
) -> ONNXProgram:
    """Export a quantized model to ONNX, by `torch.onnx.export` of `portable(model)`.

    Weights keep their codes: integers of 5 to 8 bits are stored in 8, of 1 to 4 bits in 4 (INT4, UINT4), and are read
    by DequantizeLinear, which runtimes fuse with the product that follows; look-up tables and small floating-point
    formats by Gather; float8 by Cast. Products with integer activations are MatMulInteger.

    Args:
        model: a quantized model, or what `portable` returned for one.
        args, kwargs: example inputs of the model.
        path: file to write; None writes none.
        activations: see `portable`.
        opset_version: at least 21, the first with 4-bit integers and scales per group.
        external_data: see `torch.onnx.ONNXProgram.save`; None writes a second file beside large models.
        options: for `torch.onnx.export`: `dynamic_shapes`, `input_names`, `output_names`, ...

    Returns:
        The program; `program.model_proto` is the model, `program.save(path)` writes it.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        ValueError: `opset_version` is below 21, no weight is quantized, or a weight quantizes its input to a format
            for which ONNX has no operators.
        RuntimeError: ONNX has no operator for an operation of the model; the message of torch.onnx names it.
    """
    if opset_version < OPSET:
        raise ValueError(f"onnx: opset_version is {opset_version}; weights in groups or of 4 bits need {OPSET} or more")
    ready = model if is_portable(model) else portable(model, activations)
    _check(ready)
    with torch.no_grad():
        program = torch.onnx.export(
            ready,
            tuple(args),
            kwargs=dict(kwargs or {}),
            dynamo=True,
            opset_version=opset_version,
            optimize=False,
            verbose=False,
            custom_translation_table=onnx_translations(),
            **options,
        )
    assert program is not None
    codes = {f"{name}_qdata": scheme.weight.dtype for name, scheme in schemes_of(ready).items()}
    _simplify(program, Weights(program.model.graph, codes))
    if path is not None:
        program.save(path, external_data=external_data)
    return program


def _check(model: nn.Module) -> None:
    """Raise `ValueError` if ONNX cannot quantize the input of a weight as it has to be."""
    for name, scheme in schemes_of(model).items():
        activation = scheme.activation
        if activation is None:
            continue
        if activation.dtype.format is not None or activation.scale_dtype == torch.float8_e8m0fnu:
            raise ValueError(
                f"onnx: {name} quantizes its input to {activation}, for which ONNX has no operators; use a weight-only "
                "recipe of the same format"
            )


def _simplify(program: ONNXProgram, weights: Weights) -> None:
    """Rewrite the weights of a program, then fold constants, except what would turn codes into floats."""
    import onnx_ir.passes.common as common
    from onnxscript.optimizer import fold_constants

    weights.rewrite()
    kept = set(weights.codes)

    def should_fold(node: Any) -> bool | None:
        """None leaves the decision to the optimizer."""
        if any(value is not None and value.name in kept for value in node.inputs):
            kept.update(value.name for value in node.outputs)
            return False
        return None

    fold_constants(program.model, onnx_shape_inference=False, should_fold=should_fold)
    for clean in (common.CommonSubexpressionEliminationPass(), common.RemoveUnusedNodesPass()):
        clean(program.model)
    if missing := weights.missing():
        raise RuntimeError(f"onnx: the codes of {', '.join(missing)} were lost in the export; please report it")
