"""A training script as people write it: a residual network with batch norm."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.c2, self.b2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        # where the shape changes, so does the shortcut
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.b1(self.c1(x)))
        return F.relu(self.b2(self.c2(y)) + self.shortcut(x))


class ConvNet(nn.Module):
    def __init__(self, widths=(8, 16), classes=10):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1)
        inputs = (widths[0], *widths)
        self.blocks = nn.Sequential(*[Block(i, o, 1 + (i != o)) for i, o in zip(inputs, widths, strict=False)])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def loss(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.1)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)


def batch(size=4):
    return torch.randn(size, 3, 16, 16), torch.randint(0, 10, (size,))


def train(steps=200):
    model = ConvNet()
    steps_of = optimizer(model)
    rates = scheduler(steps_of)
    for _ in range(steps):
        x, target = batch()
        steps_of.zero_grad()
        loss(model(x), target).backward()
        steps_of.step()
        rates.step()


# What `oxitorch to-jax` reads.
def example_inputs():
    return batch()[0]


def example_targets():
    return {"target": batch()[1]}


if __name__ == "__main__":
    train()
