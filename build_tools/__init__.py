"""From the kernel table to the compiled kernel library and the Python extension."""
