"""What one attention call is, and what it must satisfy.

    fields       arguments and results, declared once
    rules        which arguments go together, as data; interpret applies them
    checks       a whole call, by what tensors, lengths and masks ask of single arguments
    pieces       what lists and bits of a mask count in
    window, fp8, rounding   window_size in two integers; e4m3 and its scales; what rounding takes

Errors name the argument, the rule and the value.
"""

from .fields import AttentionCall, Gradients, Incoming, Results, Tangents

__all__ = ["AttentionCall", "Gradients", "Incoming", "Results", "Tangents"]
