"""Train a small GPT, letter by letter, on sentences of many lengths: three ways, and what each costs.

The sentences are those of Python's own help. Each new shape is a program to compile, so what counts is how many shapes
a way of making batches has, and how much of them is padding:

  a length at a time    a batch has sentences of one length: no padding, and a shape for each length
  padded                the same batches, padded to a few lengths that `bucketize` chooses
  packed                several sentences in a row of one length: one shape, and attention that keeps them apart

Run it again and nothing is compiled: the programs are on the disk.

python examples/varying_lengths.py                  # on the accelerator
python examples/varying_lengths.py --device cpu     # the same program on plain PyTorch
"""

import argparse
import json
import re
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn as nn
import torch.nn.functional as F
from oxitorch.data import (
    BucketBatchSampler,
    Buckets,
    bucketize,
    next_token_labels,
    pack_sequences,
    pad_collate,
    segment_mask,
)
from torch.utils.data import DataLoader


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask):
        batch, time, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(dim, dim=2)
        q, k, v = (z.view(batch, time, self.heads, -1).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, time, dim))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Without dropout: the ways are to differ in shapes alone."""

    def __init__(self, vocab, longest, dim=64, heads=4, layers=1):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(longest, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, positions, mask=None):
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def load_sentences(batch_size, lengths):
    """Sentences of so many lengths, `batch_size` of each, as numbers; and the letters.

    They are padded to multiples of 8. No length is one, so that the ways share no programs.
    """
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).split())
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    by_length = defaultdict(list)
    for sentence in re.split(r"(?<=[.!?]) ", text):
        by_length[len(sentence)].append(torch.tensor([number[c] for c in sentence]))
    enough = sorted(n for n, of_length in by_length.items() if len(of_length) >= batch_size and n > 16 and n % 8)
    chosen = [enough[i * (len(enough) - 1) // max(lengths - 1, 1)] for i in range(lengths)]
    return [s for n in chosen for s in by_length[n][:batch_size]], letters


def padded(batch, buckets):
    """Rows of a sentence each. What is behind it no letter sees, as attention is causal."""
    tokens, mask = pad_collate(batch, buckets)
    return tokens, torch.arange(tokens.shape[1]), mask.long(), next_token_labels(tokens, mask)


def loss_of(model, batch, device, packed, reduction="mean"):
    tokens, positions, segments, labels = (t.to(device) for t in batch)
    logits = model(tokens, positions, segment_mask(segments, causal=True) if packed else None)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def counted(device):
    """How many programs there are so far, and the seconds in which they were compiled."""
    if device.type == "cpu":  # plain PyTorch, which has none
        return {}
    torch.tpu.synchronize()
    return {name: torch.tpu.metrics()[name] for name in ("programs", "compile_s")}


def train(model, loader, rounds, device, packed, lr):
    """The losses of all steps, and what they cost."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    before = counted(device)
    losses, shapes, letters, seconds = [], set(), [], []
    for _ in range(rounds):
        begin, steps = time.perf_counter(), []
        letters.append(0)
        for batch in loader:
            loss = loss_of(model, batch, device, packed)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(loss.detach())
            shapes.add(tuple(batch[0].shape))
            letters[-1] += int(batch[2].count_nonzero())
        losses += [step.item() for step in steps]
        seconds.append(time.perf_counter() - begin)
    return {
        "losses": losses,
        "shapes": len(shapes),
        **{name: now - before[name] for name, now in counted(device).items()},
        "letters/s": sum(letters) / sum(seconds),
        "in the last round": letters[-1] / seconds[-1],
    }


@torch.no_grad()
def loss_per_letter(model, loader, device, packed):
    """Of all sentences, with the weights as they are."""
    total, count = 0.0, 0
    for batch in loader:
        total += loss_of(model, batch, device, packed, reduction="sum").item()
        count += int((batch[3] != -100).sum())
    return total / count


def pack(sentences, length, steps):
    """Rows of several sentences each, in so many batches of one size; the last rows may be empty."""
    fewest = len(pack_sequences(sentences, length).packing)
    in_step = -(-fewest // steps)
    packed = pack_sequences(sentences, length, rows=-(-fewest // in_step) * in_step)
    labels = next_token_labels(packed.tokens, packed.segment_ids)
    return packed.packing, list(zip(packed.tokens, packed.positions, packed.segment_ids, labels, strict=True)), in_step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="tpu", help="tpu or cpu (default: tpu)")
    parser.add_argument("--lengths", type=int, default=12, help="of how many lengths there are sentences")
    parser.add_argument("--max-graphs", type=int, default=4, help="to how many of them they are padded")
    parser.add_argument("--batch-size", type=int, default=8, help="sentences in a batch, and of each length")
    parser.add_argument("--rounds", type=int, default=3, help="how often each sentence is seen")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=Path, help="write the losses of each way to this JSON file")
    args = parser.parse_args()

    device = torch.device(args.device)
    if device.type != "cpu":
        torch.tpu.set_background_compile(False)  # what is timed are the final programs
    sentences, letters = load_sentences(args.batch_size, args.lengths)
    lengths = [len(sentence) for sentence in sentences]
    exact, buckets = Buckets(set(lengths), lengths), bucketize(lengths, args.max_graphs, multiple_of=8)
    packing, rows, in_step = pack(sentences, buckets.sizes[-1], steps=len(exact))

    def batches(sizes):
        """Of one length each, in the same order for all sizes to which they are padded."""
        sampler = BucketBatchSampler(lengths, exact, args.batch_size, seed=args.seed)
        return DataLoader(sentences, batch_sampler=sampler, collate_fn=partial(padded, buckets=sizes))

    ways = {
        "a length at a time": (exact.waste, lambda: batches(exact)),
        f"padded to {len(buckets)} lengths": (buckets.waste, lambda: batches(buckets)),
        "packed": (packing.waste, lambda: DataLoader(rows, in_step, shuffle=True)),
    }
    print(f"{len(sentences)} sentences of {len(exact)} lengths, {min(lengths)} to {max(lengths)} letters\n")
    print(f"{buckets}\n\n{packing}\n")
    results = {}
    for way, (waste, loader) in ways.items():
        torch.manual_seed(args.seed)
        model = GPT(len(letters), buckets.sizes[-1], layers=args.layers).to(device)
        print(f"training, {way} ...", flush=True)
        results[way] = train(model, loader(), args.rounds, device, way == "packed", args.lr) | {"waste": waste}
    show(results)

    # The last model, asked about all sentences in each way.
    asked = {way: loss_per_letter(model, loader(), device, way == "packed") for way, (_, loader) in ways.items()}
    print(
        "With the same weights, the loss per letter is " + ", ".join(f"{x:.6f} {way}" for way, x in asked.items()) + "."
    )
    if args.losses:
        args.losses.write_text(json.dumps({way: found["losses"] for way, found in results.items()} | {"asked": asked}))


def show(results):
    print(f"\n{'':20}shapes  programs  compiling   waste  letters/s  in the last round  last loss")
    for way, found in results.items():
        compiling = f"{found['compile_s']:.1f} s" if "compile_s" in found else "-"
        print(
            f"{way:20}{found['shapes']:6}{found.get('programs', '-'):>10}{compiling:>11}{found['waste']:8.1%}"
            f"{found['letters/s']:11,.0f}{found['in the last round']:19,.0f}{found['losses'][-1]:11.4f}"
        )
    one, other = (found["losses"] for found in list(results.values())[:2])
    apart = max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))
    print(
        f"\nPadding changes no loss: in {len(one)} steps the first two ways are {apart:.0e} apart at most, relatively."
    )


if __name__ == "__main__":
    main()
