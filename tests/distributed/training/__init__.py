"""PyTorch's ways to train in several processes give what one process gives on the CPU with the whole batch."""
