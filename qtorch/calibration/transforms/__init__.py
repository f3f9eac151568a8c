"""Transforms of the float weights of a model before they are rounded, one a file.

    calibrated(recipe, data, transforms=[smooth()])

They change no output of the model (but `clip`, which says so): places where channels can be scaled are found in the
graph of `torch.export`, tried with numbers, and left alone where the outputs change (docs/guides/transforms.md).
"""

from .clip import Clip
from .clip import Clip as clip
from .rotate import Rotate
from .rotate import Rotate as rotate
from .scaling import Awq, Smooth
from .scaling import Awq as awq
from .scaling import Smooth as smooth
from .work import Transform, run_transforms

__all__ = ["Awq", "Clip", "Rotate", "Smooth", "Transform", "awq", "clip", "rotate", "run_transforms", "smooth"]
