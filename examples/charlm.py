"""Train a small GPT, letter by letter, on the text of Python's own help, and let it write.

python examples/charlm.py                  # on the accelerator
python examples/charlm.py --device cpu     # the same program on plain PyTorch
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        batch, time, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(dim, dim=2)
        q, k, v = (z.view(batch, time, self.heads, -1).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, time, dim))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab, block, dim=128, heads=4, layers=3):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(block, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


def load_text():
    """The help topics of Python, half a million letters or so, as numbers."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    letters = sorted(set(text))
    number = {letter: i for i, letter in enumerate(letters)}
    return torch.tensor([number[c] for c in text]), letters


def batches(tokens, block, batch_size):
    """Random pieces of the text and, for each letter, the letter that follows."""
    while True:
        starts = torch.randint(0, len(tokens) - block - 1, (batch_size,)).tolist()
        pieces = torch.stack([tokens[s : s + block + 1] for s in starts])
        yield pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def write(model, prompt, length, device, temperature=0.8):
    """Continues `prompt` (as long as the model looks back) by `length` letters."""
    model.eval()
    window, written = prompt.view(1, -1).to(device), []
    for _ in range(length):
        logits = model(window)[0, -1].cpu()
        letter = torch.multinomial(F.softmax(logits / temperature, dim=0), 1)
        written.append(letter.item())
        window = torch.cat((window[:, 1:], letter.view(1, 1).to(device)), dim=1)
    return written


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="tpu", help="tpu or cpu (default: tpu)")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--block", type=int, default=64, help="how many letters the model looks back")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=300, help="letters to write at the end")
    parser.add_argument("--checkpoint", type=Path, default=Path("charlm.pt"))
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this JSON file")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    tokens, letters = load_text()

    model = GPT(len(letters), args.block, layers=args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps)

    losses = []
    progress = tqdm(range(args.steps), unit="step")
    stream = batches(tokens, args.block, args.batch_size)
    for step in progress:
        inputs, targets = next(stream)
        logits = model(inputs.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        if step % 10 == 0:
            progress.set_postfix(loss=f"{loss.item():.3f}")
    if args.losses:
        args.losses.write_text(json.dumps(torch.stack(losses).tolist()))

    # What a later run, or another machine, needs to go on.
    torch.save({"model": model.state_dict(), "letters": letters, "step": args.steps}, args.checkpoint)
    saved = torch.load(args.checkpoint, map_location=device, weights_only=True)
    reloaded = GPT(len(saved["letters"]), args.block, layers=args.layers).to(device)
    reloaded.load_state_dict(saved["model"])

    prompt = tokens[: args.block]
    written = write(reloaded, prompt, args.length, device)
    print(f"last loss {losses[-1].item():.3f}; what the reloaded model writes:\n")
    print("".join(letters[i] for i in prompt.tolist()), "".join(letters[i] for i in written), sep="|")


if __name__ == "__main__":
    main()
