"""Which package is calling: for the few answers and messages that depend on it."""

from __future__ import annotations

import sys
from types import FrameType

OWN = "qtorch"


def calling_frame() -> FrameType | None:
    """The innermost call that is not of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == OWN:
        frame = frame.f_back
    return frame


def calling_package() -> str:
    """The name of the package whose code has called this one; empty if there is none."""
    frame = calling_frame()
    return "" if frame is None else frame.f_globals.get("__name__", "").partition(".")[0]
