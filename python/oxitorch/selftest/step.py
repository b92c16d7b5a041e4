"""A training step whose cost preflight predicts and the selftest measures: a small transformer with Adam.

`python step.py` runs three steps; `oxitorch preflight` captures them.
"""

import torch
from torch import nn

STEPS = 3


class Model(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, tokens=512, width=256, depth=2):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)

    def forward(self, x):
        """int64 `[batch, length]` to float32 `[batch, length, tokens]`."""
        return self.head(self.blocks(self.embed(x)))


def training(device, batch=8, length=128):
    """A function that makes a step and gives its loss, a tensor of the device."""
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.randint(0, 512, (batch, length + 1), generator=torch.Generator().manual_seed(1)).to(device)

    def step():
        optimizer.zero_grad()
        logits = model(data[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


if __name__ == "__main__":
    step = training("tpu")
    for _ in range(STEPS):
        step()
    torch.tpu.synchronize()
