"""QtorchHfQuantizer: what transformers asks about a quantized model while it loads, saves and trains it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from ...dtypes import QuantizedTensor
from ...formats.transformers_folder import QUANT_METHOD
from ...module_repr import show_quantized
from ...recipe import Recipe
from ...report import QuantizeReport
from . import experts
from .config import QtorchConfig, name_on_hub
from .plan import Plan
from .saved_state import in_training, read_stored, state_to_save, still_trained
from .stored_weights import StoredWeights
from .training_state import prepare, to_be_read_later

logger = logging.getLogger(__name__)

_DISK = (
    "qtorch: device_map puts a part of the model on 'disk', where transformers keeps floats alone; load without 'disk' "
    "(device_map='cpu'), which takes the memory of the quantized weights, and then call "
    "qtorch.integrations.accelerate.dispatch_model(model, device_map, offload_dir=...)"
)


@register_quantizer(QUANT_METHOD)
class QtorchHfQuantizer(HfQuantizer):
    """See the top of the file.

    Attributes:
        report: what on-the-fly quantization has done; None for a model that was loaded quantized.
        trained: recipe of each weight in training, by name.
    """

    requires_calibration = False
    quantization_config: QtorchConfig

    def __init__(self, quantization_config: QtorchConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report: QuantizeReport | None = None
        self.trained: dict[str, Recipe] = {}
        self._plan: Plan | None = None
        self._stored: StoredWeights | None = None
        self._in_training = False
        self._compiles = True

    # --- before loading ---

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        if isinstance(device_map, dict) and "disk" in map(str, device_map.values()):
            raise ValueError(_DISK)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        if not self.pre_quantized:
            self.quantization_config.base_model = name_on_hub(model.name_or_path)
            self._plan = Plan(model, self.quantization_config)
            return model
        if not checkpoint_files or not all(str(file).endswith(".safetensors") for file in checkpoint_files):
            raise ValueError(
                "qtorch: a quantized model is loaded from the safetensors files of its folder, not from a state dict: "
                "their headers say how its weights are quantized"
            )
        self._stored = StoredWeights(checkpoint_files, self.quantization_config, model.dtype)
        to_be_read_later(model, self._stored, self.quantization_config)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self._plan is not None and param_name in self._plan.targets

    def get_quantize_ops(self) -> Any:
        from .conversions import Quantize

        assert self._plan is not None
        return Quantize(self._plan)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Put the converter of stored weights first; names that `save_pretrained` wrote are those of the model."""
        if self._stored is None:
            return weight_conversions
        from .conversions import StoredNames
        from .renaming import origins, renamings_of, users_renamings

        if self.quantization_config.names == "model":
            weight_conversions = users_renamings(weight_conversions, model)
        stored = self._stored
        found = origins(stored.index.quantized, stored.others, weight_conversions, model)
        return [StoredNames(stored, renamings_of(weight_conversions), found), *weight_conversions]

    # --- after loading ---

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if "disk" in map(str, (getattr(model, "hf_device_map", None) or {}).values()):
            raise ValueError(_DISK)
        self.trained = prepare(model, self._plan, self._stored, self.quantization_config)
        if self._plan is not None:
            self._plan.calibrate(model, self.quantization_config)
            self.quantization_config = model.config.quantization_config = self.quantization_config.without_data()
            self.report = self._plan.report(model)
            logger.info(str(self.report))
        self._plan = self._stored = None
        self.watch(model)
        experts.choose(model)
        for module in model.modules():
            show_quantized(module)
        return model

    def watch(self, model: Any) -> None:
        """Prepare a model that is quantized now to be saved, trained and compiled."""
        # Stored names are those of the model: its converters must not split codes as they split float experts.
        model._weight_conversions = []
        if not any(getattr(hook, "hook", None) is read_stored for hook in model._load_state_dict_pre_hooks.values()):
            model.register_load_state_dict_pre_hook(read_stored)
        self.trained = still_trained(model, self.trained)
        self._in_training = bool(in_training(model))
        # Experts in training run one after the other, as many as the router chooses: no graph holds them.
        self._compiles = not any(
            isinstance(p, QuantizedTensor) and p.trains and p.dim() == 3 for p in model.parameters()
        )

    # --- saving ---

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        config = self.quantization_config
        config.names = "model"
        config.model_dtype = str(model.dtype).removeprefix("torch.")
        model.config.quantization_config = config
        config.set_trained(still_trained(model, self.trained))
        return state_to_save(model)

    # --- training and compiling ---

    @property
    def is_trainable(self) -> bool:
        """Every kernel passes the gradient on to the input, so that adapters train."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether weights of the model themselves are in training."""
        return self._in_training

    @property
    def is_compileable(self) -> bool:
        return self._compiles

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        from ...quantize_api import dequantize_

        # A model that was saved has the name of its dtype in its config.
        return dequantize_(model).to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
