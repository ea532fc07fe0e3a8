"""What is generated: the extension's C++ of a call, kernels' units, the list of kernels."""
