"""integrations/compat.py, where users import it."""

from .integrations.compat import *  # noqa: F403
from .integrations.compat import __all__ as __all__
