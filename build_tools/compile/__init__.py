"""What compiles: compilers and torch, architectures, ninja's files, one compile."""
