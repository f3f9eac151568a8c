"""AutoRound's own formats, which are packings of GPTQ and AWQ under another `quant_method`.

    packing_format                              tensors
    auto_round:auto_gptq, auto_round:gptq       GPTQ, zero points stored as z - 1
    auto_round, auto_round:gptqmodel            GPTQ, zero points stored as z
    auto_round:auto_awq, auto_round:awq         AWQ

Source: auto-round 0.16 `auto_round/inference/backend.py`. Layers of other widths are found by the shapes of their
tensors; `extra_config` gives their group sizes.
"""

from __future__ import annotations

from ..checkpoint.folder_source import FolderSource, StoredWeight
from ..checkpoint.source import register_source
from .awq import awq_weights
from .blocks import group_sizes
from .gptq import GptqFormat, gptq_weights

_GPTQ = {
    "auto_round:auto_gptq": GptqFormat(minus_one=True),
    "auto_round:gptq": GptqFormat(minus_one=True),
    "auto_round": GptqFormat(minus_one=False),
    "auto_round:gptqmodel": GptqFormat(minus_one=False),
}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_DEFAULT = "auto_round:auto_gptq"
"""That of transformers' AutoRoundConfig, for files without one."""


@register_source
class AutoRoundSource(FolderSource):
    """A folder of AutoRound."""

    format = "auto-round"
    methods = ("auto-round", "intel/auto-round")

    def find_weights(self) -> dict[str, StoredWeight]:
        config = self.folder.quantization_config
        packing = str(config.get("packing_format") or _DEFAULT)
        sizes = group_sizes(config)
        if packing in _AWQ:
            return awq_weights(self, sizes)
        if packing not in _GPTQ:
            raise ValueError(
                f"{self.path}: packing_format is {packing!r:.60}, which is not read; known: "
                f"{', '.join([*_GPTQ, *_AWQ])}. Export it by AutoRound in one of these, or in format llm_compressor "
                "as a folder of compressed-tensors"
            )
        return gptq_weights(self, _GPTQ[packing], sizes)
