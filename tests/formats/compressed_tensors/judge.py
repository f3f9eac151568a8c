"""The compressed-tensors package as the judge: what it makes of a folder, and folders that it makes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def groups_of(config: dict[str, Any]) -> list[tuple[list[str], Any, str]]:
    """(targets, QuantizationScheme, format) of every group, parsed by the package."""
    from compressed_tensors.quantization import QuantizationConfig

    parsed = QuantizationConfig.model_validate(config)
    return [(scheme.targets, scheme, scheme.format or parsed.format) for scheme in parsed.config_groups.values()]


def scheme_of(module: str, groups: list[tuple[list[str], Any, str]]) -> tuple[Any, str]:
    from compressed_tensors.utils.match import match_name

    for targets, scheme, format in groups:
        if any(match_name(module, target) for target in targets):
            return scheme, format
    return next((scheme, format) for targets, scheme, format in groups if "Linear" in targets)


def decompress(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the quantized modules of a folder, by the name of the weight."""
    from compressed_tensors.compressors import BaseCompressor

    groups = groups_of(json.loads((folder / "config.json").read_text())["quantization_config"])
    stored: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        stored |= load_file(path)
    found = {}
    for module in [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]:
        scheme, format = scheme_of(module, groups)
        state = {name[len(module) + 1 :]: value for name, value in stored.items() if name.startswith(f"{module}.")}
        made = BaseCompressor.get_value_from_registry(str(format)).decompress(state, scheme)
        found[f"{module}.weight"] = made["weight"]
    return found


def compress(weights: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> None:
    """Write a folder in which the package has quantized and compressed these weights with scales that it has chosen."""
    import compressed_tensors
    from compressed_tensors.compressors import BaseCompressor

    stored = {}
    groups = groups_of(config)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        scheme, format = scheme_of(module, groups)
        state = {"weight": weight, **qparams(weight, scheme.weights)}
        made = BaseCompressor.get_value_from_registry(str(format)).compress(state, scheme)
        stored |= {f"{module}.{key}": value.contiguous() for key, value in made.items()}
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    text = json.dumps({"quantization_config": {"version": compressed_tensors.__version__, **config}})
    (folder / "config.json").write_text(text)


def qparams(weight: torch.Tensor, args: Any) -> dict[str, torch.Tensor]:
    """Scales and zero points as the package's observers choose them, by its own functions."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    values = weight.float()
    rows, columns = weight.shape
    if args.strategy == "tensor":
        blocks = values.reshape(1, -1)
    elif args.strategy == "channel":
        blocks = values
    elif args.strategy == "block":
        r, c = args.block_structure
        padded = torch.nn.functional.pad(values, (0, -columns % c, 0, -rows % r))
        blocks = padded.unflatten(1, (-1, c)).unflatten(0, (-1, r)).transpose(1, 2).flatten(2)
    else:
        blocks = values.reshape(rows, -1, args.group_size)
    low, high = blocks.amin(-1), blocks.amax(-1)
    if args.strategy == "tensor_group":
        divisor = generate_gparam(values.min().reshape(1), values.max().reshape(1))
        scale, _ = calculate_qparams(low, high, args, global_scale=divisor)
        return {"weight_scale": scale, "weight_global_scale": divisor}
    scale, zero_point = calculate_qparams(low, high, args)
    if scale.dtype is torch.uint8:
        scale = 2.0 ** (scale.float() - 127)
    if args.type == "float" and args.strategy == "group":
        return {"weight_scale": scale}
    scale = scale.to(weight.dtype)
    if args.strategy == "channel":
        scale, zero_point = scale.reshape(rows, 1), zero_point.reshape(rows, 1)
    return {"weight_scale": scale} if args.symmetric else {"weight_scale": scale, "weight_zero_point": zero_point}
