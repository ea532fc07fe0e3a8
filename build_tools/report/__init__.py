"""Reports of what was built, and of the sources."""
