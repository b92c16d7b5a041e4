"""PyTorch's own databases of ops, modules and optimizers, on the device against the CPU; see docs/conformance.md."""
