"""integrations/rotary_layers.py, where users import it."""

from .integrations.rotary_layers import *  # noqa: F403
from .integrations.rotary_layers import __all__ as __all__
