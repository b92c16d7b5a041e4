"""Train a small ResNet on the handwritten digits that come with scikit-learn.

python examples/digits.py                  # on the accelerator
python examples/digits.py --device cpu     # the same program on plain PyTorch
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


class BasicBlock(nn.Module):
    def __init__(self, in_channels, out_channels, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width=16, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            BasicBlock(width, width),
            BasicBlock(width, 2 * width, stride=2),
            BasicBlock(2 * width, 4 * width, stride=2),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        return self.head(x.mean(dim=(2, 3)))


def load_data(seed):
    """1,797 gray images of 8x8 pixels, a fifth of them for the test."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    train, test = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=seed)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def shift(batch):
    """Moves each image by up to one pixel, so that the model cannot learn positions by heart."""
    images, labels = torch.utils.data.default_collate(batch)
    padded = F.pad(images, (1, 1, 1, 1))
    dx, dy = torch.randint(0, 3, (2, len(images))).tolist()
    images = torch.stack([p[:, y : y + 8, x : x + 8] for p, x, y in zip(padded, dx, dy, strict=True)])
    return images, labels


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    correct = total = 0
    for images, labels in loader:
        predicted = model(images.to(device)).argmax(dim=1)
        correct += (predicted == labels.to(device)).sum()
        total += len(labels)
    return correct.item() / total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="tpu", help="tpu or cpu (default: tpu)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--steps", type=int, help="stop after this many steps")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"))
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this JSON file")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    train_set, test_set = load_data(args.seed)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, collate_fn=shift)
    test_loader = DataLoader(test_set, 360)

    model = ResNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    steps = args.steps or args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps)

    losses = []
    progress = tqdm(total=steps, unit="step")
    while len(losses) < steps:
        model.train()
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.05)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.detach())
            if len(losses) % 10 == 0:
                progress.set_postfix(loss=f"{loss.item():.3f}")
            progress.update()
            if len(losses) == steps:
                break
    progress.close()
    if args.losses:
        args.losses.write_text(json.dumps(torch.stack(losses).tolist()))

    # What a later run, or another machine, needs to go on.
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}, args.checkpoint)
    reloaded = ResNet().to(device)
    reloaded.load_state_dict(torch.load(args.checkpoint, map_location=device, weights_only=True)["model"])

    trained, restored = accuracy(model, test_loader, device), accuracy(reloaded, test_loader, device)
    print(f"test accuracy {trained:.1%}, after reloading {args.checkpoint} {restored:.1%}")
    assert trained == restored


if __name__ == "__main__":
    main()
