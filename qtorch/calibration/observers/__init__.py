"""Observers: which range of its input a layer represents, chosen from data; one a file.

    quantize_(model, calibrated(int8_static_activation_int8_weight(), batches, observer=percentile(99.9)))

Every module of this package is imported here, and every observer it registers becomes a name of this package and of
`qtorch.calibration`, so adding a file adds an observer.
"""

from ...primitives.discovery import import_modules

import_modules(__name__, __path__)

from .base import OBSERVERS, Observer, observer_of, register_observer  # noqa: E402

OBSERVER_NAMES = sorted(name for name, cls in OBSERVERS.items() if cls.__module__.startswith(f"{__name__}."))

__all__ = ["OBSERVERS", "Observer", "observer_of", "register_observer", *OBSERVER_NAMES]

globals().update({name: OBSERVERS[name] for name in OBSERVER_NAMES})
