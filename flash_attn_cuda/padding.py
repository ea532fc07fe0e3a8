"""integrations/padding.py, where users import it."""

from .integrations.padding import *  # noqa: F403
from .integrations.padding import __all__ as __all__
