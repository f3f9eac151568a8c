"""vLLM and SGLang serve folders of transformers' `save_pretrained` that qtorch has quantized, with qtorch's kernels.

The functions `register_vllm` and `register_sglang` are entry points ("vllm.general_plugins", "sglang.srt.plugins"),
which the engines call in each of their processes. Both have one interface, which vLLM's sources define: a configuration
chooses a method for each layer, and the method creates parameters, takes the stored tensors one by one, and multiplies.

A layer of an engine joins some of a model (`qkv_proj`: q_proj, k_proj, v_proj). It keeps their weights as they were
quantized, one after the other, and concatenates their outputs, so each number is that of the model in transformers.
With tensor parallelism it keeps its rows or its columns of each. Written for vLLM 0.33 and SGLang 0.5.23.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.formats.transformers_folder import QUANT_METHOD, TransformersFolder, cast
from ..dtypes import QuantizedTensor, serialize

Entries = Mapping[str, serialize.Entry]
Ranks = Callable[[Any, int], tuple[int, int]]
"""(layer, number of a weight in it) -> (rank, ranks) of the processes that share this weight."""

SHARDS: dict[Any, int] = {None: 0, "q": 0, "k": 1, "v": 2}
"""Name of a joined layer, as the engines' loaders say it -> its number; numbers stay."""


def register_vllm() -> None:
    """Register `quant_method` "qtorch" with vLLM; more calls do nothing more."""
    quantization = import_module("vllm.model_executor.layers.quantization")
    if QUANT_METHOD not in quantization.QUANTIZATION_METHODS:
        linear = import_module("vllm.model_executor.layers.linear")
        made = _config_class(quantization, linear, linear, linear, lambda layer, number: (layer.tp_rank, layer.tp_size))
        quantization.register_quantization_config(QUANT_METHOD)(made)


def register_sglang() -> None:
    """Register `quant_method` "qtorch" with SGLang; more calls do nothing more."""
    quantization = import_module("sglang.srt.layers.quantization")
    if QUANT_METHOD not in quantization.QUANTIZATION_METHODS:
        linear = import_module("sglang.srt.layers.linear")
        base, unquantized = (import_module(f"{quantization.__name__}.{name}") for name in ("base_config", "unquant"))

        def ranks(layer: Any, number: int) -> tuple[int, int]:
            group = layer.kv_tp_group if number and hasattr(layer, "kv_tp_group") else layer.tp_group
            return linear.get_group_rank_size(group)

        made = _config_class(quantization, base, linear, unquantized, ranks)
        quantization.QUANTIZATION_METHODS[QUANT_METHOD] = quantization.CPU_QUANTIZATION_METHODS[QUANT_METHOD] = made


def _config_class(quantization: Any, methods: Any, linear: Any, unquantized: Any, ranks: Ranks) -> Any:
    """The class of configurations for an engine, from its modules that have `QuantizationConfig`, `LinearMethodBase`,
    `LinearBase` and `UnquantizedLinearMethod`."""

    class QtorchLinearMethod(QuantizedLinear, methods.LinearMethodBase):
        pass

    class QtorchEngineConfig(quantization.QuantizationConfig):
        """Which layers of a folder are quantized, and how: from the headers of its files."""

        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__()
            self.packed_modules_mapping = config.get("packed_modules_mapping", {})
            if config.get("training"):
                raise ValueError(f"{QUANT_METHOD}: weights in training; quantize_(model, convert()), then save it")
            self.entries: Entries = {}
            # SGLang hands on the model's configuration, vLLM calls `maybe_update_config`.
            if config.get("hf_config") is not None:
                self.maybe_update_config(config["hf_config"].name_or_path)

        def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
            self.entries = read_entries(model_name, revision)

        def get_name(self) -> str:
            return QUANT_METHOD

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 75

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: Mapping[str, Any]) -> "QtorchEngineConfig":
            return cls(config)

        def get_scaled_act_names(self) -> list[str]:
            return []

        def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
            self.entries = hf_to_vllm_mapper.apply_dict(self.entries)

        apply_weight_name_mapper = apply_vllm_mapper

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            if isinstance(layer, linear.LinearBase):
                entries = self.joined(prefix)
                return QtorchLinearMethod(prefix, entries, ranks) if entries else unquantized.UnquantizedLinearMethod()
            inside = (f"{prefix}.", f"{prefix}_")  # fused experts have parameters of other names
            if prefix and type(layer).__name__ != "Attention" and any(name.startswith(inside) for name in self.entries):
                raise ValueError(
                    f"{QUANT_METHOD}: {prefix} is a {type(layer).__name__} with quantized weights; engines serve "
                    'linear layers of qtorch alone: save_quantized(model, folder, format="compressed-tensors")'
                )
            return None

        def joined(self, prefix: str) -> list[serialize.Entry]:
            """The entries of the layers that the engine joins in `prefix`; none if they are in floating point."""
            path, _, last = prefix.rpartition(".")
            names = [f"{path}.{each}" if path else each for each in self.packed_modules_mapping.get(last, [last])]
            found = {name: self.entries[f"{name}.weight"] for name in names if f"{name}.weight" in self.entries}
            if not found and f"{prefix}.weight" in self.entries:
                return [self.entries[f"{prefix}.weight"]]  # joined in the model too
            if len(found) not in (0, len(names)):
                floats = ", ".join(name for name in names if name not in found)
                raise ValueError(f"{QUANT_METHOD}: the engine joins {', '.join(names)}, but {floats} are floats")
            return list(found.values())

    return QtorchEngineConfig


def read_entries(name: str, revision: str | None = None) -> Entries:
    """The entries of quantized weights in the headers of a folder, or of a model of the Hub, which is downloaded."""
    path = Path(name)
    if not path.exists():
        from huggingface_hub import snapshot_download

        patterns = ["*.safetensors", "*.json"]
        path = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    if not TransformersFolder.recognizes(path):
        raise ValueError(f"{path} has no weights of qtorch: write it by save_pretrained of a quantized model")
    with TransformersFolder.open(path, verify=False, mmap=True) as source:
        assert isinstance(source, TransformersFolder)
        return source.entries


class QuantizedLinear:
    """The method of a layer, whose weights have these entries, in the order in which the engine joins them."""

    def __init__(self, prefix: str, entries: Sequence[serialize.Entry], ranks: Ranks) -> None:
        self.prefix, self.entries, self.ranks = prefix, entries, ranks
        self.stored: list[dict[str, Tensor]] = [{} for _ in entries]

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: Sequence[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **attributes: Any,
    ) -> None:  # fmt: skip
        """Give `layer` an empty parameter for each stored tensor, whose loader keeps what it gets."""
        self.sizes, self.inputs, self.dtype = list(output_partition_sizes), input_size_per_partition, params_dtype
        keys = {key.rpartition(".")[2] for entry in self.entries for key in entry["tensors"].values()}
        for key in sorted({"weight", *keys}):  # "weight" is that of the marker

            def load(parameter: Tensor, loaded: Tensor, shard: Any = None, key: str = key) -> None:
                self.stored[SHARDS.get(shard, shard)][key] = loaded.clone()  # engines may reuse its memory

            empty = nn.Parameter(torch.empty(0, dtype=params_dtype, device="cpu"), requires_grad=False)
            empty.weight_loader = load  # type: ignore[attr-defined]
            layer.register_parameter(key, empty)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the quantized weights of `layer`, `weight_0`, `weight_1`, ..., from what was loaded."""
        if not any(self.stored):
            return  # the engine calls it again after a reload of other layers
        device = next(layer.parameters()).device
        for key in {key for stored in self.stored for key in stored} & layer._parameters.keys():
            delattr(layer, key)
        sizes = self.sizes if len(self.sizes) == len(self.entries) else [sum(self.sizes)]
        for number, (entry, stored, size) in enumerate(zip(self.entries, self.stored, sizes, strict=True)):
            whole = serialize.from_canonical(entry, partial(self._part, stored))
            rank, ranks = self.ranks(layer, number)
            local = _own(_own(whole, 0, size, rank, ranks), 1, self.inputs, rank, ranks)
            weight = nn.Parameter(cast(local, self.dtype).to(device), requires_grad=False)
            layer.register_parameter(f"weight_{number}", weight)
            stored.clear()

    def _part(self, stored: Mapping[str, Tensor], key: str) -> Tensor:
        name = key.rpartition(".")[2]
        if name not in stored:
            raise ValueError(f"{QUANT_METHOD}: the files lack {key}, a part of {self.prefix}")
        return stored[name].cpu()

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., inputs) times the weights, outputs concatenated, plus `bias`."""
        weights = [layer._parameters[f"weight_{number}"] for number in range(len(self.entries))]
        biases = [None] * len(weights) if bias is None else bias.split([weight.shape[0] for weight in weights])
        outputs = [nn.functional.linear(x, weight, part) for weight, part in zip(weights, biases, strict=True)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _own(weight: QuantizedTensor, dim: int, size: int, rank: int, ranks: int) -> QuantizedTensor:
    """The part of `size` rows or columns that belongs to a rank; several ranks share one if there are fewer."""
    parts = weight.shape[dim] // size
    if parts * size != weight.shape[dim] or ranks % parts:
        raise ValueError(f"{QUANT_METHOD}: axis {dim} of {tuple(weight.shape)} is not cut into {ranks} parts of {size}")
    if parts == 1:
        return weight
    made: Any = weight.narrow(dim, rank * parts // ranks * size, size)
    return made
