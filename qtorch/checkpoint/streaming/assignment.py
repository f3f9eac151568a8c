"""Which recipe each tensor of a checkpoint gets."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...dtypes.joining import shares_scales
from ...model.misfit import OnMisfit, choose
from ...model.targets import Reach, Refused, Target, find_targets
from ...quantize_api import check_targets, place
from ...recipes.base import Recipe, WeightRecipe
from .. import hf_folder, stacked_experts, tensor_file
from ..formats import compressed_tensors, transformers_folder
from ..sources import Contents, Source

# A model without data that has the tensors of a checkpoint, so that recipes are assigned to it as to any model.
#
# Only names and shapes are known. Tensors called ``*.weight`` with two axes are the weights of `nn.Linear`, except
#
# - tables: the last name of the module contains "embed" or is one of `TABLES`; they become `nn.Embedding`;
# - matrices of the transposed linear layer `Conv1D` of transformers, in models of `CONV1D_MODELS`.
#
# Tensors with the experts of a layer get a module that `weight_kinds` knows, and all other tensors are bare parameters,
# which get a recipe only by name, as in `quantize_`.


TABLES = frozenset({"wte", "wpe", "shared", "relative_attention_bias", "codebook", "pe_k"})
"""Last names of modules that hold a table, beside those with "embed" in them."""

HEADS_AND_ROUTERS = frozenset({*compressed_tensors.vllm.NOT_QUANTIZED, "classifier"})
"""Last names of heads and routers, which other packages that read a folder leave in floating point."""

CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})
"""Values of `model_type` whose linear layers are `Conv1D`, with weights (in features, out features)."""

TRANSPOSED_EXPERTS = frozenset({"aria", "aria_text", "gpt_oss", "llama4", "llama4_text", "openai_privacy_filter"})
"""Values of `model_type` whose experts are stored as (experts, in features, out features)."""

_CONV1D = re.compile(r"(?:.+\.)?(?:c_attn|c_proj|c_fc|q_attn)\.weight")


def _called(name: str) -> nn.Module:
    """What stands for a module of transformers, by whose name the kinds of its weights are known."""
    return type(name, (nn.Module,), {})()


class FusedExperts(nn.Module):
    """Experts in the tensors ``gate_up_proj``, ``down_proj``, ..., marked as transformers does."""

    is_concatenated = True

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed


def skeleton(tensors: dict[str, Contents], model_type: str | None = None) -> nn.Module:
    """A model on the meta device for what is stored under each name; `model_type` is that of config.json."""
    root = nn.Module()
    modules: dict[str, nn.Module] = {"": root}
    for name, contents in tensors.items():
        path, _, attribute = name.rpartition(".")
        if path in modules:
            continue
        module = _experts(name, contents, model_type) or _layer(name, contents, model_type)
        if module is not None:
            modules[path] = module
    for path in list(modules):
        _connect(modules, path)
    for name, contents in tensors.items():
        path, _, attribute = name.rpartition(".")
        owner = _connect(modules, path)
        if attribute not in owner._parameters:
            owner._parameters[attribute] = _parameter(contents)
    return root


def _experts(name: str, contents: Contents, model_type: str | None) -> nn.Module | None:
    """The module of a tensor that holds the experts of a layer, or None."""
    path, _, attribute = name.rpartition(".")
    if len(contents.shape) == 3 and stacked_experts.is_fused(name):
        return FusedExperts(model_type in TRANSPOSED_EXPERTS)
    if len(contents.shape) == 3 and attribute == "weight" and path.endswith((".input_linear", ".output_linear")):
        return _called("JetMoeParallelExperts")
    if model_type == "dbrx" and path.endswith(".experts.mlp") and attribute in ("w1", "v1", "w2"):
        return _called("DbrxExpertGLU")
    return None


def _layer(name: str, contents: Contents, model_type: str | None) -> nn.Module | None:
    """The layer whose weight has this name, or None for a bare parameter."""
    path, _, attribute = name.rpartition(".")
    module = path.rpartition(".")[2]
    if not path or attribute != "weight" or len(contents.shape) != 2 or not contents.dtype.is_floating_point:
        return None
    if model_type in CONV1D_MODELS and _CONV1D.fullmatch(name):
        return _called("Conv1D")
    if model_type == "whisper" and module == "embed_positions":
        return _called("WhisperPositionalEmbedding")
    rows, columns = contents.shape
    if module not in HEADS_AND_ROUTERS and ("embed" in module or module in TABLES):
        layer: nn.Module = nn.Embedding(rows, columns, device="meta")
    else:
        layer = nn.Linear(columns, rows, bias=False, device="meta")
        layer._parameters.pop("bias")
    layer._parameters["weight"] = _parameter(contents)
    return layer


def _parameter(contents: Contents) -> nn.Parameter:
    return nn.Parameter(torch.empty(contents.shape, dtype=contents.dtype, device="meta"), requires_grad=False)


def _connect(modules: dict[str, nn.Module], path: str) -> nn.Module:
    """The module at `path`, made and connected with its parents if need be."""
    if path not in modules:
        modules[path] = nn.Module()
    if path:
        parent, _, last = path.rpartition(".")
        # Not by `add_module`, which refuses names such as "type" that are attributes of every module.
        _connect(modules, parent)._modules[last] = modules[path]
    return modules[path]


_HEAD = "a head or a router, in floating point for the readers of the format {!r}; ask for it by name"


def assign(
    contents: Mapping[str, Contents], recipe: Recipe | Mapping[str, Recipe | None], source: Source,
    config: Mapping[str, Any], format: str, reach: Reach = "linear", on_misfit: OnMisfit = "error",
) -> dict[str, Target[Recipe]]:  # fmt: skip
    """The target of each weight of two or more axes that is not quantized, by its name. Recipes are completed as
    engines that read `format` need it, by the largest magnitudes of weights in NVFP4 in `source` if engines join them;
    `config` is that of config.json."""
    floats = {name: of for name, of in contents.items() if of.scheme is None}
    model = skeleton(floats, config.get("model_type"))
    targets: list[Target[Recipe]] = find_targets(model, recipe, None, reach)
    if format != tensor_file.OWN_FORMAT and not isinstance(recipe, Mapping) and reach != "all":
        for slot in [target.slot for target in targets]:
            if slot.kind.name == "linear" and slot.module_name.rpartition(".")[2] in HEADS_AND_ROUTERS:
                slot.recipe, slot.reason = None, _HEAD.format(format)
    choose(targets, on_misfit, _check)
    chosen = [target for target in targets if target.recipe is not None]
    if not chosen:
        raise Refused("nothing to quantize: no linear layer in floating point")
    place(chosen)
    if format == compressed_tensors.config_groups.METHOD:
        _complete(chosen, source)
    check_targets(chosen, _check, "\nnothing is written")
    if format == transformers_folder.TransformersFormat.name:
        _check_joined({target.slots[0].name: target.recipe for target in targets})
    return {target.slots[0].name: target for target in targets}


def _complete(chosen: list[Target[Recipe]], source: Source) -> None:
    """What `recipes_for_vllm` does for a model."""
    by_name: dict[str, tuple[Recipe, Tensor]] = {}
    for target in chosen:
        recipe, slot = target.recipe, target.slot
        assert recipe is not None
        absmax = torch.zeros(1, dtype=torch.float32, device="cpu")
        if compressed_tensors.vllm.is_nvfp4(recipe):
            absmax = source.tensor(slot.name).abs().max().reshape(1)
        by_name[slot.label] = recipe, absmax
    scales = compressed_tensors.vllm.tensor_scales(by_name)
    for target in chosen:
        slot = target.slot
        assert slot.recipe is not None
        slot.recipe = compressed_tensors.vllm.adapted(slot.recipe, slot.parameter.dtype, scales.get(slot.label))


def _check_joined(recipes: Mapping[str, Recipe | None]) -> None:
    """Check that transformers can join the experts of a layer as they were if the model had been quantized."""
    for names in stacked_experts.joined_in_models(recipes):
        asked = list(dict.fromkeys(recipes[name] for name in names))
        where = f"{names[0]} to {names[-1]}: transformers joins these experts in one parameter"
        if len(asked) > 1:
            raise Refused(f"{where}, and they have different recipes: {', '.join(map(str, asked))}")
        if isinstance(asked[0], WeightRecipe) and shares_scales(asked[0].linear_spec().weight):
            raise Refused(
                f"{where}, whose scales of {asked[0]} are found together; take scales per row or group alone "
                "(nf4_weight_only(double_quantize=False)), or format='qtorch'"
            )


def check_values(name: str, target: Target[Recipe], weight: Tensor) -> Recipe:
    """The recipe of a target, which can quantize this weight."""
    assert target.recipe is not None
    try:
        target.recipe.check(target.kind.view(weight))
    except (ValueError, TypeError) as error:
        raise type(error)(f"quantize_checkpoint: {name}: {error}") from error
    return target.recipe


def _check(recipe: Recipe, target: Target[Recipe]) -> None:
    """Raise `ValueError` or `TypeError` unless the recipe can quantize a tensor of this shape without its module."""
    slot, shape = target.slot, tuple(target.parameter.shape)
    if recipe.data is not None and not recipe.in_order:
        raise ValueError(f"{recipe} runs the model on data; use quantize_")
    if recipe.trains or not isinstance(recipe, WeightRecipe):
        raise ValueError(f"{recipe} is not a recipe for inference; use quantize_")
    if len(shape) > 3 or (len(shape) == 3 and slot.kind.name != "experts"):
        raise ValueError(f"has shape {shape}; the weights of convolutions need their layer: use quantize_")
    matrix = slot.kind.matrix_shape(shape)
    recipe.check_form(torch.empty(matrix, dtype=slot.parameter.dtype, device="meta"))


def meta_model(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """The model of ``config.json``, of the class and, by default, the dtype that it names, in evaluation mode.
    Parameters have no memory; buffers, which files lack, have values."""
    if not (folder / hf_folder.CONFIG).is_file():
        raise ValueError(f"{folder}: no {hf_folder.CONFIG}, from which transformers could build the model; give model=")
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{folder}: building the model needs transformers: pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{folder}: transformers cannot build the model; give model=. It says: {reason}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    kind = next((each for each in named if each is not None), None)
    with parameters_on_meta():
        if kind is None:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = kind._from_config(config, dtype=dtype)
    model.tie_weights()
    return model.eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters that modules register have no memory; buffers, which files lack, have."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
