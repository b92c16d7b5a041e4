"""Programs whose numbers and lengths vary: batches that are slices, rows written in turn, a recurrent net, generation.

    python benches/varying.py                # all
    python benches/varying.py slices lstm

Run it on a quiet machine, `lstm` and `generate` with an empty cache (`OXITORCH_CACHE_DIR`), as they measure compiling.
`generate` needs transformers.
"""

import argparse
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


def seconds(f) -> float:
    started = time.perf_counter()
    f()
    torch.tpu.synchronize()
    return time.perf_counter() - started


def slices() -> None:
    """An epoch over slices of a tensor on the device, against tensors that were cut before; best of several."""
    x, y = torch.randn(6400, 784, device="tpu"), torch.randint(0, 10, (6400,), device="tpu")
    cut = [(x[i : i + 64].clone(), y[i : i + 64].clone()) for i in range(0, 6400, 64)]

    def epochs(batches):
        model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to("tpu")
        optimizer = torch.optim.AdamW(model.parameters())

        def epoch():
            for inputs, labels in batches():
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()

        return epoch

    both = [epochs(lambda: ((x[i : i + 64], y[i : i + 64]) for i in range(0, 6400, 64))), epochs(lambda: cut)]
    ours, before = (min(times) for times in zip(*([seconds(f) for f in both] for _ in range(14)), strict=True))
    print(f"slices: {ours * 10:.3f} ms a step, cut before: {before * 10:.3f} ms, {ours / before:.2f}x")


def writes() -> None:
    """400 writes to rows, each computed from the row and the one before, against PyTorch's CPU; best of several."""

    def epochs(device):
        x = torch.zeros(512, 64, device=device)

        def epoch(start):
            for s in range(start, start + 200):
                x[s] += 1
                x[s] = x[s - 1] * 0.5 + x[s]

        return epoch

    both = [epochs("tpu"), epochs("cpu")]
    taken = [[seconds(lambda f=f, start=start: f(start)) for f in both] for start in [*range(1, 300, 13)] * 4]
    ours, cpu = (min(times) for times in zip(*taken, strict=True))
    programs = torch.tpu.metrics()["programs"]
    print(f"writes: {ours * 1e3:.2f} ms, CPU {cpu * 1e3:.2f} ms, {ours / cpu:.2f}x, {programs} programs so far")


def lstm() -> None:
    """Forward and backward of a bidirectional LSTM of two layers over 80 steps."""
    net, x = nn.LSTM(32, 64, 2, bidirectional=True).to("tpu"), torch.randn(80, 8, 32, device="tpu")
    for call in range(4):
        took = seconds(lambda: net(x)[0].sum().backward())
        print(f"lstm: call {call + 1} {took:.2f} s, {torch.tpu.metrics()['programs']} programs so far")


def generate() -> None:
    """A tiny Llama with a static cache: prompts of new and of known lengths."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().to("tpu")
    for what, length in (("first", 8), ("same length", 8), ("new length", 11), ("same length", 11)):
        made, results = torch.tpu.metrics()["programs"], []
        prompt = torch.arange(length, device="tpu")[None]
        options = {"max_new_tokens": 40, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
        took = seconds(lambda p=prompt, r=results, o=options: r.append(model.generate(p, **o)))
        tokens = results[0].shape[1] - length
        made = torch.tpu.metrics()["programs"] - made
        print(f"generate: {what}: {tokens / took:.1f} tokens a second, {made} new programs")


BENCHES = {"slices": slices, "writes": writes, "lstm": lstm, "generate": generate}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="*", help=f"of {', '.join(BENCHES)} (default: all)")
    names = parser.parse_args().bench or list(BENCHES)
    if unknown := set(names) - set(BENCHES):
        sys.exit(f"no bench {', '.join(sorted(unknown))}")
    for name in names:
        BENCHES[name]()


if __name__ == "__main__":
    main()
