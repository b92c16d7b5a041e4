"""Calls of `crates/aten/goldens` whose operands do not fit: `python unfit.py FIRST STEP EACH [WORD]`.

Of each call some arguments are changed: other ranks, sizes, dtypes, strides, numbers that are negative or huge, empty
tensors and lists. What comes of a call does not matter, as long as the process lives, so each is printed before it is
made, and what it gave behind it. The changes are a function of the call alone.
"""

import contextlib
import random
import resource
import sys
import zlib
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from support import to_device  # noqa: E402
from test_goldens import INTERNAL, call, cases  # noqa: E402

# Of address space, so that a size that is not refused cannot take all memory of the machine.
MOST_BYTES = 12 << 30
INTS = [-1, -3, -100, 0, 1, 2, 5, 100, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -1.0, 1e30, float("nan"), float("inf")]
WORDS = ["", "nonsense"]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def other_tensor(x, rng):
    """A tensor unlike this one in rank, size, dtype, values or strides."""
    dim = rng.randrange(x.dim()) if x.dim() else 0
    changes = [
        lambda: x.unsqueeze(0),
        lambda: x.unsqueeze(-1),
        lambda: x.new_zeros(()),
        lambda: x.new_zeros(0),
        lambda: x.to(rng.choice(DTYPES)),
        lambda: x.new_zeros([rng.choice([0, 1, 2, 3, 7]) for _ in range(rng.randrange(7))]),
    ]
    if x.dim():
        changes += [
            lambda: x.narrow(dim, 0, 0),
            lambda: x.narrow(dim, 0, min(1, x.shape[dim])),
            lambda: torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim),
            lambda: x.select(dim, 0) if x.shape[dim] else x.unsqueeze(0),
            lambda: x.transpose(0, -1),
            lambda: x.flatten(),
            lambda: x.narrow(dim, 0, 1).expand(x.shape) if x.shape[dim] else x,
        ]
    if x.dtype in (torch.int32, torch.int64):
        changes += [lambda: torch.full_like(x, rng.choice([-1, -100, 100, 2**31 - 1, -(2**31)]))] * 4
    return rng.choice(changes)()


def other_list(value, rng):
    """A list of another length, or with another item."""
    changes = [list, lambda: value[:-1], lambda: value + value[-1:], lambda: value * 3]
    if value:
        at = rng.randrange(len(value))
        changes += [lambda: [*value[:at], other(value[at], rng), *value[at + 1 :]]] * 4
    return rng.choice(changes)()


# By type, of which bool is the first, as it is an int too.
OTHERS = {
    torch.Tensor: other_tensor,
    bool: lambda x, _: not x,
    int: lambda _, rng: rng.choice(INTS),
    float: lambda _, rng: rng.choice(FLOATS),
    complex: lambda x, _: x * float("nan"),
    str: lambda _, rng: rng.choice(WORDS),
    torch.dtype: lambda _, rng: rng.choice(DTYPES),
    list: other_list,
}


def other(value, rng):
    """An argument unlike this one, of the same type where the schema asks for that."""
    change = next((f for kind, f in OTHERS.items() if isinstance(value, kind)), None)
    return change(value, rng) if change else None


def unfit(line, number):
    """A call of a golden with one argument that is another; each fourth time, two."""
    _, f, args, kwargs, _ = call(line)
    rng = random.Random(zlib.crc32(f"{line} {number}".encode()))
    places = [(args, i) for i, a in enumerate(args) if a is not None]
    places += [(kwargs, name) for name, a in kwargs.items() if a is not None and name != "device"]
    for holder, at in rng.sample(places, min(len(places), 1 + (number % 4 == 3))):
        holder[at] = other(holder[at], rng)
    return f, args, kwargs


def lines():
    """The calls of the goldens that a user can make."""
    found = [line for p in cases() if not p.marks for line, _ in p.values[0]]
    return [n for n in found if not INTERNAL.search(n.split()[0])]


def shown(value):
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    return repr(value)


def main(first, step, each, word=""):
    """Makes `each` calls of every `step`-th golden from the `first` on, of those that have this word."""
    torch.empty(0, device="tpu")
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    for line in [n for n in lines() if word in n][first::step]:
        for number in range(each):
            f, args, kwargs = unfit(line, number)
            words = ", ".join([*map(shown, args), *(f"{n}={shown(a)}" for n, a in kwargs.items())])
            print(f"{number} of {line}: {f}({words})".replace("\n", " "), flush=True)
            answer = "a value"
            try:
                f(*to_device(args), **to_device(kwargs))
                torch.tpu.synchronize()
            except Exception as e:
                answer = f"{type(e).__name__}: {e}"
                with contextlib.suppress(Exception):
                    torch.tpu.synchronize()
            print("    " + answer.replace("\n", " | "), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), *sys.argv[4:])
