"""A training script as people write it: an LSTM that predicts the next character."""

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 40


class CharLSTM(nn.Module):
    def __init__(self, dim=16, hidden=24):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.lstm = nn.LSTM(dim, hidden, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(hidden, VOCAB)

    def forward(self, x):
        y, _ = self.lstm(self.embed(x))
        return self.head(y)


model = CharLSTM()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
grad_clip = 0.25


def loss(output, target):
    return F.cross_entropy(output.transpose(1, 2), target)


def batch(size=3, length=9):
    x = torch.randint(0, VOCAB, (size, length + 1))
    return x[:, :-1], x[:, 1:]


def train(steps=200):
    for _ in range(steps):
        x, target = batch()
        optimizer.zero_grad()
        loss(model(x), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()


# What `oxitorch to-jax` reads.
def example_inputs():
    return batch()[0]


def example_targets():
    return {"target": batch()[1]}


if __name__ == "__main__":
    train()
