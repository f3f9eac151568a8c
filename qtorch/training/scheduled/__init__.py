"""The engine with a schedule: state that a contraction keeps from call to call, and layers that hold it."""

from ...discovery import import_modules

import_modules(__name__, __path__)
