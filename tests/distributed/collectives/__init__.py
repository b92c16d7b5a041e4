"""Every collective of c10d on device tensors gives what it gives on CPU tensors, or what its definition says."""
