"""Results of PyTorch's own test files: results.txt, which is kept, and docs/pytorch-tests.md, which is made of it.

python -m tests.pytorch_tests --page      # results.txt of a run, and the page
python -m tests.pytorch_tests.page        # the page of results.txt
"""

import collections
import datetime
import fnmatch
import json
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import tomllib

from . import placed, processes

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results.txt"
PAGE = ROOT / "docs" / "pytorch-tests.md"
# Those of torch.distributed that name no more of NCCL and CUDA than what may stand for them.
DISTRIBUTED = (
    "test_c10d_common",
    "test_c10d_functional_native",
    "test_c10d_object_collectives",
    "test_c10d_ops_nccl",
    "test_c10d_spawn_gloo",
    "test_c10d_spawn_nccl",
    "test_device_mesh",
    "test_functional_api",
    "_tensor/test_api",
    "_tensor/test_convolution_ops",
    "_tensor/test_dtensor",
    "_tensor/test_dtensor_compile",
    "_tensor/test_dtensor_ops",
    "_tensor/test_embedding_ops",
    "_tensor/test_experimental_ops",
    "_tensor/test_init",
    "_tensor/test_math_ops",
    "_tensor/test_matrix_ops",
    "_tensor/test_optimizers",
    "_tensor/test_pointwise_ops",
    "_tensor/test_random_ops",
    "_tensor/test_redistribute",
    "_tensor/test_tensor_ops",
    "_tensor/test_view_ops",
    "tensor/parallel/test_parallelize_api",
    "tensor/parallel/test_tp_examples",
    "tensor/parallel/test_tp_random_state",
    "tensor/parallel/test_tp_style",
    "_composable/fsdp/test_fully_shard_autograd",
    "_composable/fsdp/test_fully_shard_clip_grad_norm_",
    "_composable/fsdp/test_fully_shard_comm",
    "_composable/fsdp/test_fully_shard_extensions",
    "_composable/fsdp/test_fully_shard_frozen",
    "_composable/fsdp/test_fully_shard_grad_scaler",
    "_composable/fsdp/test_fully_shard_init",
    "_composable/fsdp/test_fully_shard_memory",
    "_composable/fsdp/test_fully_shard_mixed_precision",
    "_composable/fsdp/test_fully_shard_overlap",
    "_composable/fsdp/test_fully_shard_state",
    "_composable/fsdp/test_fully_shard_state_dict",
    "_composable/fsdp/test_fully_shard_training",
    "_composable/test_composability/test_2d_composability",
    "_composable/test_replicate",
    "checkpoint/e2e/test_e2e_save_and_load",
    "checkpoint/e2e/test_fine_tuning",
    "checkpoint/e2e/test_pipeline",
    "checkpoint/fsdp/test_fsdp_dsd",
    "checkpoint/test_checkpoint",
    "checkpoint/test_compatibility",
    "checkpoint/test_dtensor_checkpoint",
    "checkpoint/test_dtensor_resharding",
    "checkpoint/test_file_system_checkpoint",
    "checkpoint/test_file_system_checkpoint_cpu",
    "checkpoint/test_format_utils",
    "checkpoint/test_fsdp_model_state",
    "checkpoint/test_fsdp_optim_state",
    "checkpoint/test_fsdp_tp_checkpoint_conversion",
    "checkpoint/test_fsspec",
    "checkpoint/test_hsdp_checkpoint",
    "checkpoint/test_planner",
    "checkpoint/test_save_load_api",
    "checkpoint/test_state_dict",
    "checkpoint/test_state_dict_utils",
    "checkpoint/test_tp_checkpoint",
    "pipelining/test_backward",
    "pipelining/test_microbatch",
    "pipelining/test_pipe",
    "pipelining/test_schedule",
    "pipelining/test_schedule_multiproc",
    "pipelining/test_stage",
    "pipelining/test_unflatten",
    "optim/test_zero_redundancy_optimizer",
    "fsdp/test_fsdp_core",
    "fsdp/test_fsdp_grad_acc",
    "fsdp/test_fsdp_mixed_precision",
    "fsdp/test_fsdp_optim_state",
    "fsdp/test_fsdp_state_dict",
    "fsdp/test_fsdp_use_orig_params",
    "algorithms/ddp_comm_hooks/test_ddp_hooks",
    "algorithms/test_join",
)
# Those of the compiler and of torch.func that ask for no code of inductor's.
COMPILER = (
    "functorch/test_eager_transforms",
    "functorch/test_vmap",
    "functorch/test_ops",
    "functorch/test_aotdispatch",
    "functorch/test_control_flow",
    "dynamo/test_activation_checkpointing",
    "dynamo/test_aot_autograd",
    "dynamo/test_autograd_function",
    "dynamo/test_backward_higher_order_ops",
    "dynamo/test_ctx_manager",
    "dynamo/test_functions",
    "dynamo/test_higher_order_ops",
    "dynamo/test_hooks",
    "dynamo/test_modules",
    "dynamo/test_optimizers",
    "dynamo/test_repros",
    "dynamo/test_subclasses",
    "dynamo/test_unspec",
)
FILES = (
    "test_view_ops",
    "test_indexing",
    "test_shape_ops",
    "test_sort_and_select",
    "test_tensor_creation_ops",
    "test_type_promotion",
    "test_scatter_gather_ops",
    "test_masked",
    "test_foreach",
    "test_optim",
    "test_spectral_ops",
    "test_reductions",
    "test_torch",
    "test_nn",
    "test_linalg",
    "test_autograd",
    processes.NAME,
    *(f"{processes.FOLDER}{name}" for name in DISTRIBUTED),
    *COMPILER,
)


# Behind the name of a file of which each test was given the first sample of its operation alone.
FIRST_SAMPLE = ":first"


class Found(NamedTuple):
    """A file's results."""

    # One test of so many, by a checksum of its name,
    every: int
    # but for these classes, of which all were run.
    whole: list[str]
    # Each test's sign.
    tests: dict[str, str]


Results = dict[str, Found]


def load(results: Path) -> dict[str, dict]:
    """The last result of each test."""
    if not results.exists():
        return {}
    return {f"{r['file']} {r['test']}": r for r in map(json.loads, results.read_text().splitlines())}


def is_sampled(test: str, every: int) -> bool:
    """Whether a test is in a sample of one of so many, which is the same each time."""
    return zlib.crc32(test.encode()) % every == 0


def sign(record: dict) -> str:
    """`+` passes; `=` passes neither on the device nor on the CPU.

    What passes on the CPU: `-` fails, `!` ends the process or takes too long, `~` is skipped by a mark of PyTorch's.
    """
    if record["status"] == "pass":
        return "+"
    if record.get("cpu") != "pass":  # a test that does not use the device was not tried there
        return "="
    return {"fail": "-", "skip": "~"}.get(record["status"], "!")


def split(test: str) -> tuple[str, str]:
    """`TestViewOps.test_conj`, and the dtypes and the like: "" or `_complex64`."""
    case, name = test.split(".")
    base, mark, variant = name.rpartition("_tpu")
    if not mark:
        base, variant = name, ""
    return f"{case.removesuffix('PRIVATEUSE1').removesuffix('TPU')}.{base}", variant


def summary(known: dict[str, dict], origin: str) -> str:
    """A run as text: a line for each generic test, with the sign of each variant."""
    every: dict[str, dict[str, int]] = {}
    for record in known.values():
        of = every.setdefault(record["file"], {})
        case = case_of(record["test"])
        of[case] = max(of.get(case, 1), record["every"])
    files: dict[str, dict[str, list[str]]] = {}
    for record in known.values():
        of = every[record["file"]][case_of(record["test"])]
        if record["status"] != "unused" and is_sampled(record["test"], of):
            base, variant = split(record["test"])
            files.setdefault(record["file"], {}).setdefault(base, []).append(f"{sign(record)}{variant}")
    lines = [f"# generated by `python -m tests.pytorch_tests --page`: {origin}"]
    for file, tests in sorted(files.items()):
        lines.append(heading(file, every[file]))
        lines += [f"  {base} {' '.join(sorted(signs))}" for base, signs in sorted(tests.items())]
    return "\n".join([*lines, ""])


def case_of(test: str) -> str:
    """The class of a test."""
    return split(test)[0].split(".")[0]


def heading(file: str, every: dict[str, int]) -> str:
    """A file's line, by the sample of each of its classes: `FILE every 20 whole TestVmapAPI`."""
    most = max(every.values())
    whole = sorted(case for case, n in every.items() if n == 1 < most)
    return " ".join([f"{file} every {most}", *(["whole", *whole] if whole else [])])


def parse(text: str) -> Results:
    """What `summary` wrote."""
    found: Results = {}
    for line in text.splitlines()[1:]:
        if not line.startswith(" "):
            file, _, every, *whole = line.split(" ")
            found[file] = Found(int(every), whole[1:], {})
        else:
            base, *signs = line.split()
            found[file].tests.update({f"{base}{s[1:]}": s[0] for s in signs})
    return found


def reasons() -> list[dict]:
    """Why tests fail: `reason`, and `tests`, shell patterns over `FILE CLASS.TEST_VARIANT`."""
    return tomllib.loads((HERE / "reasons.toml").read_text()).get("known", [])


def explained(results: Results) -> tuple[dict[str, list[str]], list[str], list[str]]:
    """The failing tests by reason, those without one, and patterns of which nothing fails."""
    failing = [f"{f} {t}" for f, found in results.items() for t, s in found.tests.items() if s in "-!"]
    ran = [f"{f} {t}" for f, found in results.items() for t in found.tests]
    by_reason, stale, left = {}, [], set(failing)
    for group in reasons():
        for pattern in group["tests"]:
            matched = fnmatch.filter(failing, pattern)
            by_reason.setdefault(group["reason"], []).extend(t for t in matched if t in left)
            left.difference_update(matched)
            if not matched and fnmatch.filter(ran, pattern):
                stale.append(pattern)
    return by_reason, [t for t in failing if t in left], stale


def verdict(results: Results) -> int:
    """Says what fails without a reason, and which reasons are no longer needed."""
    _, unexplained, stale = explained(results)
    print(*(f"{t}: fails and passes on the CPU" for t in unexplained), sep="\n")
    print(*(f"{p}: passes, though reasons.toml has it" for p in stale), sep="\n")
    return int(bool(unexplained or stale))


def text(origin: str, results: Results) -> str:
    """The page."""
    out = [
        "<!-- generated by `python -m tests.pytorch_tests.page`; a test compares it with what is there -->",
        "# PyTorch's own tests",
        "",
        f"What `make pytorch-tests DIR=pytorch/test` found: {origin}.",
        "The files are PyTorch's, read where they are; each device-generic test is instantiated for the device.",
        "What does not pass is repeated on the CPU, and what passes there counts.",
        "Tests that PyTorch marks for other devices alone are skipped, and shown when they pass on the CPU.",
        f"`{processes.NAME}` comes with torch: tests of torch.distributed for gloo and for CUDA, in {processes.RANKS} "
        "processes, where CUDA's devices are the device's.",
        "Of them those that need devices count as passing on the CPU.",
        f"In files of `{processes.FOLDER}` the device's group stands for gloo and NCCL; "
        "what does not pass is repeated on the CPU with gloo.",
        "`test_c10d_spawn` is none of them: it has classes that those of gloo and NCCL derive from, and no test.",
        f"In files of {', '.join(f'`{folder}`' for folder in placed.FOLDERS)} the device stands for CUDA and is where "
        'tests that name no device make tensors, and backend "tpu" stands for inductor.',
        "Tests of these files that do not use the device are left out.",
        f"Behind `{FIRST_SAMPLE}` are the classes of a file that go through PyTorch's database of operations; "
        "each test has the first sample of its operation alone, by PyTorch's own switch "
        "(`PYTORCH_OPINFO_SAMPLE_INPUT_INDEX`), and is not counted in all.",
        "The switch does not reach its database of modules: tests of `TestEagerFusionModuleInfo` have all samples.",
        "There XLA compiles with its least effort, and what fails so is repeated with all effort.",
        "Where files are older than torch, some ask for what it has no more, and pass nowhere; "
        "what is read otherwise there is in `tests/pytorch_tests` (`processes.py`, `placed.py`).",
        "",
        "| file | tests | pass | of those that pass on the CPU | fail | crash or time out | skipped |",
        "|---|---|---|---|---|---|---|",
    ]
    total = collections.Counter()
    for file, found in results.items():
        counts = collections.Counter(found.tests.values())
        if not file.endswith(FIRST_SAMPLE):
            total += counts
        out.append(row(f"{file}{sample(found)}", counts))
    waiting = ", ".join(file for file in FILES if file not in results)
    out += [row("all", total), ""]
    out += [f"Not run to the end yet: {waiting}.", ""] if waiting else []
    out += ["## Why tests fail", ""]
    by_reason, unexplained, _ = explained(results)
    if unexplained:
        by_reason["not looked into yet"] = unexplained
    groups = sorted(by_reason.items(), key=lambda x: -len(x[1]))
    if groups:
        counted = total["+"] + total["-"] + total["!"] - len(groups[0][1])
        out += [f"Without the first of these, {100 * total['+'] / counted:.1f} % of all would pass.", ""]
    for reason, tests in groups:
        if tests:
            names = sorted(set(tests))
            out += [f"**{len(tests)}: {reason}**", "", ", ".join(f"`{n}`" for n in names) + ".", ""]
    return "\n".join(out)


def sample(found: Found) -> str:
    """Which of a file's tests were run, behind its name."""
    if found.every == 1:
        return ""
    whole = f"; {', '.join(found.whole)} whole" if found.whole else ""
    return f" (1 of {found.every}, by a checksum of the name{whole})"


def row(name: str, c: collections.Counter) -> str:
    of = c["+"] + c["-"] + c["!"]
    share = f"{100 * c['+'] / of:.1f} %" if of else ""
    return f"| {name} | {sum(c.values())} | {c['+']} | {share} | {c['-']} | {c['!']} | {c['~']} |"


def write(known: dict[str, dict], torch_version: str) -> None:
    """Files and classes that were not run keep their results."""
    today, files = datetime.date.today(), sorted({r["file"] for r in known.values()})
    origin = f"files of PyTorch {pytorch_version(known)}, torch {torch_version}, {today}"
    before, results = read() if RESULTS.exists() else ("", {})
    if results.keys() - set(files):
        names = sorted(set(map(group, files)))
        others = [part for part in before.split("; ") if not set(part.split(": ")[0].split(", ")) <= set(names)]
        origin = "; ".join([*others, f"{', '.join(names)}: {origin}"])
    head, *new = blocks(summary(known, origin))
    kept = {b.split(" ")[0]: b for b in blocks(RESULTS.read_text())[1:]} if results else {}
    for block in new:
        file = block.split(" ")[0]
        kept[file] = with_classes_of(block, kept.get(file, block))
    RESULTS.write_text(head + "".join(kept[file] for file in sorted(kept)))
    write_page()


def group(file: str) -> str:
    """The files of its folder, as the first line of results.txt names them."""
    folder, sub, _ = file.partition("/")
    first = FIRST_SAMPLE if file.endswith(FIRST_SAMPLE) else ""
    return f"{folder}/*{first}" if sub else file


def with_classes_of(new: str, old: str) -> str:
    """A file's part with what only its older part has: classes that were not run again."""
    every, tests = {}, []
    for block in (new, old):
        first, *lines = block.splitlines()
        most, whole = parse(f"\n{first}")[first.split(" ")[0]][:2]
        cases = {line.split(".")[0].strip() for line in lines}
        tests += [line for line in lines if line.split(".")[0].strip() not in every]
        every = {case: 1 if case in whole else most for case in cases} | every
    return "\n".join([heading(first.split(" ")[0], every), *sorted(tests), ""])


def blocks(text: str) -> list[str]:
    """The first line of what `summary` wrote, and the part of each file."""
    return re.split(r"^(?=\w)", text, flags=re.MULTILINE)


def pytorch_version(known: dict[str, dict]) -> str:
    return ", ".join(sorted({r["pytorch"] for r in known.values()}))


def read() -> tuple[str, Results]:
    kept = RESULTS.read_text()
    return kept.splitlines()[0].split(": ", 1)[1], parse(kept)


def write_page() -> None:
    PAGE.write_text(text(*read()))


if __name__ == "__main__":
    write_page()
