"""What serves `F.linear` on any device, in torch operators. Every module of this package is imported here."""

from ...discovery import import_modules

import_modules(__name__, __path__)
