"""The public functions, from their arguments to their results; interface lists them."""
