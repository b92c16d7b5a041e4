"""A training script as people write it: a classifier of vectors."""

import torch
import torch.nn.functional as F
from torch import nn

model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)


def loss(output, target):
    return F.cross_entropy(output, target)


def batch(size=16):
    return torch.randn(size, 784), torch.randint(0, 10, (size,))


def train(steps=200):
    model.train()
    for _ in range(steps):
        x, target = batch()
        optimizer.zero_grad()
        loss(model(x), target).backward()
        optimizer.step()
        scheduler.step()


# What `oxitorch to-jax` reads.
def example_inputs():
    return batch()[0]


def example_targets():
    return {"target": batch()[1]}


if __name__ == "__main__":
    train()
