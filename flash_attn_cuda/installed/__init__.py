"""The extension that is installed, and what its kernels found wrong on a device."""
