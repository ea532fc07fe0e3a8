"""Ties to other libraries, imported only by who asks for them."""
