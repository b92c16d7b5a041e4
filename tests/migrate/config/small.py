# Small enough for a CPU.
batch_size = 4
micro_steps = 1
block_size = 16
layers = 1
width = 32
max_iters = 6
log_interval = 5
dtype = "float32"
