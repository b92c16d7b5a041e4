"""Programs whose numbers and lengths vary: batches that are slices, rows written in turn, a recurrent net over many
steps, generation, texts in buckets.

    python benches/varying.py                # all
    python benches/varying.py slices lstm

Run it on a quiet machine, all but `slices` with an empty cache (`OXITORCH_CACHE_DIR`), as they measure compiling.
`generate` needs transformers.
"""

import argparse
import sys
import time
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from oxitorch.data import BucketBatchSampler, Buckets, bucketize, next_token_labels, pad_collate
from torch.utils.data import DataLoader
from workloads import GPT


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
    """400 writes to rows of a tensor, each computed from the row and the one before, against PyTorch's CPU."""

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


class LanguageModel(nn.Module):
    """An embedding, an LSTM of two layers, and the next token."""

    def __init__(self, tokens=1000, width=256):
        super().__init__()
        self.embedding, self.rnn, self.head = (
            nn.Embedding(tokens, width),
            nn.LSTM(width, width, 2),
            nn.Linear(width, tokens),
        )

    def forward(self, tokens, unrolled):
        x = self.embedding(tokens)
        return self.head(self.unrolled(x) if unrolled else self.rnn(x)[0])

    def unrolled(self, x):
        """As PyTorch composes it of operations for each step."""
        states = [torch.zeros(2, x.shape[1], self.rnn.hidden_size, device=x.device)] * 2
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        call = x, states, self.rnn._flat_weights, True, 2, 0.0, True, False, False
        return torch.ops.aten.lstm.input._op_dk(composite, *call)[0]


def trainer(device, steps, unrolled=False):
    """A function that makes a step of training on as many steps of 32 sequences."""
    model = LanguageModel().to(device)
    optimizer, tokens = torch.optim.SGD(model.parameters(), lr=0.1), torch.randint(1000, (steps + 1, 32)).to(device)

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:-1], unrolled).flatten(0, 1), tokens[1:].flatten()).backward()
        optimizer.step()

    return step


def rnn() -> None:
    """A language model of two LSTM layers of 256 on 32 sequences: the loop against PyTorch's composition on the device,
    and against PyTorch's CPU; steps in turns, best of several."""
    for steps in (20, 50, 80):
        ways = {
            "loop": trainer("tpu", steps),
            "unrolled": trainer("tpu", steps, unrolled=True),
            "cpu": trainer("cpu", steps),
        }
        with torch.tpu.set_background_compile(False):
            for name in ("loop", "unrolled"):
                before = torch.tpu.metrics()
                first, second = seconds(ways[name]), seconds(ways[name])
                made = {k: torch.tpu.metrics()[k] - before[k] for k in ("programs", "compile_s", "ops")}
                print(
                    f"rnn: {steps} steps, {name}: first {first:.2f} s, second {second:.2f} s, {made['ops'] // 2} ops a "
                    f"step, {made['programs']} programs, {made['compile_s']:.2f} s of compiling"
                )
            times = zip(*([seconds(f) for f in ways.values()] for _ in range(22)), strict=True)
        best = dict(zip(ways, (min(of[2:]) for of in times), strict=True))
        ratios = ", ".join(f"{best['loop'] / best[name]:.2f}x {name}" for name in ("unrolled", "cpu"))
        print(f"rnn: {steps} steps, ms a step: {', '.join(f'{k} {v * 1e3:.1f}' for k, v in best.items())}: {ratios}")


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


def lengths() -> None:
    """A GPT on texts of many lengths in eight buckets, against texts of one length: tokens a second and compiling."""
    torch.tpu.set_background_compile(False)
    spread = torch.empty(400).log_normal_(4.2, 0.6, generator=torch.Generator().manual_seed(0))
    varied = spread.int().clamp(8, 256).tolist()
    buckets = bucketize(varied, 8, multiple_of=8)
    sampler = partial(BucketBatchSampler, max_tokens=1024, drop_last=True)
    steps = len(sampler(varied, buckets))

    def training(texts: list[int], sizes: Buckets):
        """A function that trains for an epoch and gives tokens without and with padding, and one that makes a step."""
        model = GPT(layers=2, block=256).to("tpu")
        optimizer = torch.optim.AdamW(model.parameters())
        collate = partial(pad_collate, buckets=sizes)
        samples = [torch.randint(256, (n,)) for n in texts]
        loader = DataLoader(samples, batch_sampler=sampler(texts, sizes), collate_fn=collate)

        def step(tokens, mask):
            labels = next_token_labels(tokens, mask)
            optimizer.zero_grad()
            F.cross_entropy(model(tokens.to("tpu")).flatten(0, 1), labels.to("tpu").flatten()).backward()
            optimizer.step()
            return int(mask.sum()), mask.numel()

        def epoch():
            return torch.tensor([step(*batch) for batch in loader]).sum(dim=0).tolist()

        return epoch

    def compiled(f) -> tuple[float, int]:
        """The seconds of compiling in a call, and how many programs that were."""
        before = torch.tpu.metrics()
        f()
        torch.tpu.synchronize()
        after = torch.tpu.metrics()
        return after["compile_s"] - before["compile_s"], after["programs"] - before["programs"]

    # As many steps of about as many tokens, padding included, each of one length: one less than the longest bucket, and
    # one less than the most frequent, so that no program serves both.
    longest, most = buckets.sizes[-1] - 1, buckets.sizes[max(range(len(buckets)), key=buckets.counts.__getitem__)] - 1
    fixed = {n: training([n] * (1024 // n * steps), Buckets([n])) for n in (longest, most)}
    bucketed = training(varied, buckets)
    print(f"lengths: {buckets}")
    for name, epoch in {f"length {longest} alone": fixed[longest], "in buckets": bucketed}.items():
        took, made = compiled(epoch)
        print(f"lengths: {name}, {made} programs compiled in {took:.1f} s")
    compiled(fixed[most])

    # Tokens a second without and with padding; also by processor time, which other work does not disturb so much.
    rates: dict = {}
    for _ in range(5):
        for name, epoch in {"bucketed": bucketed, **fixed}.items():
            counts: list = []
            processor = time.process_time()
            took = seconds(lambda e=epoch, c=counts: c.extend(e()))
            processor = time.process_time() - processor
            rates.setdefault(name, []).append([n / t for t in (took, processor) for n in counts])
    best = {name: [max(column) for column in zip(*found, strict=True)] for name, found in rates.items()}
    ours = best.pop("bucketed")
    print(f"lengths: {ours[0]:,.0f} tokens a second in buckets, {ours[1]:,.0f} with their padding")
    for n, found in best.items():
        real, padded, of_processor, padded_of_processor = (a / b for a, b in zip(ours, found, strict=True))
        print(
            f"lengths: {found[0]:,.0f} of length {n} alone: {real:.2f}x of it, with padding {padded:.2f}x; "
            f"by processor time {of_processor:.2f}x and {padded_of_processor:.2f}x"
        )


def dynamic() -> None:
    """A step of a GPT by `torch.tpu.jit(dynamic=)` on texts of many lengths that nobody pads, against texts of one
    length: tokens a second and compiling."""
    torch.tpu.set_background_compile(False)
    spread = torch.empty(400).log_normal_(4.2, 0.6, generator=torch.Generator().manual_seed(0))
    varied = spread.int().clamp(8, 255).tolist()
    size = torch.tpu.Dim(buckets=bucketize(varied, 8, multiple_of=8).sizes)
    sizes = {"tokens": {1: size}, "labels": {1: size}}

    def training(lengths: list[int], varying: dict | None):
        """A function that makes a step on each of these lengths, of about 1024 tokens with padding."""
        model = GPT(layers=2, block=256).to("tpu")
        optimizer = torch.optim.AdamW(model.parameters())

        @torch.tpu.jit(dynamic=varying)
        def step(tokens, labels):
            tokens, labels = tokens.to("tpu"), labels.to("tpu")
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
            loss.backward()
            optimizer.step()
            return loss.detach()

        batches = [torch.randint(256, (1024 // size.bound(n), n + 1)) for n in lengths]

        def epoch():
            for batch in batches:
                step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())

        real = sum(batch[:, 1:].numel() for batch in batches)
        return epoch, real, sum(batch.shape[0] * size.bound(n) for n, batch in zip(lengths, batches, strict=True))

    ways = {"255 alone": training([255] * 40, None), "many lengths": training(varied[:40], sizes)}
    for name, (epoch, real, padded) in ways.items():
        before, took = torch.tpu.metrics(), seconds(epoch)
        made = {k: torch.tpu.metrics()[k] - before[k] for k in ("programs", "compile_s")}
        print(
            f"dynamic: {name}: {made['programs']} programs compiled in {made['compile_s']:.1f} s, first epoch "
            f"{took:.1f} s, {1 - real / padded:.1%} padding"
        )
    rates: dict = {}
    for _ in range(5):
        for name, (epoch, *counts) in ways.items():
            processor = time.process_time()
            took = seconds(epoch)
            processor = time.process_time() - processor
            rates.setdefault(name, []).append([n / t for t in (took, processor) for n in counts])
    one, many = ([max(column) for column in zip(*rates[name], strict=True)] for name in ways)
    ratios = [a / b for a, b in zip(many, one, strict=True)]
    print(
        f"dynamic: {many[0]:,.0f} tokens a second of many lengths, {ratios[0]:.2f}x of one, with padding "
        f"{ratios[1]:.2f}x; by processor time {ratios[2]:.2f}x and {ratios[3]:.2f}x"
    )


BENCHES = {
    "slices": slices,
    "writes": writes,
    "lstm": lstm,
    "rnn": rnn,
    "generate": generate,
    "lengths": lengths,
    "dynamic": dynamic,
}


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
