"""functions/rotary.py, where users import it."""

from .functions.rotary import *  # noqa: F403
from .functions.rotary import __all__ as __all__
