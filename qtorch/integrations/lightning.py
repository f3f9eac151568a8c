"""Lightning: a callback that trains the model of a `Trainer` by a recipe of qtorch. Written for Lightning 2.6.

Trainer(callbacks=[QuantizeCallback(qat(int4_weight_only()), convert_at_end=True)]).fit(module)
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from ..model.report import QuantizeReport
from ..quantize_api import quantize_
from ..training import convert


class QuantizeCallback(Callback):
    """Calls `quantize_(module, recipe, **options)` before the strategy wraps the module and makes its optimizers.

    Args:
        recipe: one recipe, or an ordered mapping from names to recipes.
        convert_at_end: convert the weights in training for inference when `fit` ends; not with FSDP.
        options: more arguments of `quantize_`.

    Attributes:
        report: what `quantize_` has done; None before `fit`.

    Raises:
        TypeError, ValueError: those of `quantize_`, when `fit` starts.
    """

    def __init__(self, recipe: Any, *, convert_at_end: bool = False, **options: Any) -> None:
        self.recipe, self.convert_at_end, self.options = recipe, convert_at_end, options
        self.report: QuantizeReport | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Quantize the module once, whatever stage comes first."""
        if self.report is None:
            self.report = quantize_(pl_module, self.recipe, **self.options)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Convert it, if that is asked for."""
        if self.convert_at_end:
            quantize_(pl_module, convert())
