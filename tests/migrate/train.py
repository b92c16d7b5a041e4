"""A GPU's training script with the idioms of many: settings that a file and the command line change, a device and a
backend by name, autocast with a scaler, pinned memory, steps of several small batches.

`docs/migrate.md` takes one of the same kind through its commands, and the tests take this one.
"""

import contextlib
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size = 32
micro_steps = 4
block_size = 64
vocab_size = 64
layers = 4
width = 128
dropout = 0.1
max_iters = 1000
log_interval = 10
learning_rate = 1e-3
backend = "nccl"
device = "cuda"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
for arg in sys.argv[1:]:
    if "=" in arg:
        key, value = arg.removeprefix("--").split("=")
        globals()[key] = type(globals()[key])(value)
    else:
        with open(arg) as f:
            exec(f.read())

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    device = f"cuda:{os.environ['LOCAL_RANK']}"
    torch.cuda.set_device(device)
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
half = ptdtype != torch.float32 and device_type != "cpu"
ctx = torch.amp.autocast(device_type=device_type, dtype=ptdtype) if half else contextlib.nullcontext()
text = torch.randint(vocab_size, (10_000,))


def get_batch():
    starts = torch.randint(len(text) - block_size - 1, (batch_size,))
    pieces = torch.stack([text[i : i + block_size + 1] for i in starts])
    x, y = pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()
    if device_type == "cuda":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = (z.view(n, t, 4, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        p = dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab_size, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


model = GPT().to(device)
scaler = torch.cuda.amp.GradScaler(enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=device_type == "cuda")
if ddp:
    model = DDP(model)
for step in range(max_iters):
    for _ in range(micro_steps):
        x, y = get_batch()
        with ctx:
            loss = model(x, y) / micro_steps
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % log_interval == 0:
        print(f"iter {step}: loss {loss.item() * micro_steps:.4f}")
if ddp:
    destroy_process_group()
