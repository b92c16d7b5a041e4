"""Training as TorchTitan and torchtune do it, and checkpoints of Hugging Face, as scripts of users.

Each trains on the device in several processes, and in one on the CPU with the same global batches.
"""

import pytest

from tests.distributed.test_libraries import ONE, SAY

START = (
    SAY
    + """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_model_state_dict,
    set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
DEVICE = "tpu" if WORLD > 1 else "cpu"
if WORLD > 1:
    dist.init_process_group("cpu:gloo,tpu:tpu")
    torch.tpu.set_device(int(os.environ["LOCAL_RANK"]))
TOKENS, WIDTH, LENGTH = 32, 16, 8

def rotated(x):
    # x: batch, length, heads, size
    angles = torch.arange(x.shape[1], device=x.device)[:, None] / 10 ** torch.arange(x.shape[-1] // 2, device=x.device)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, 4)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))

class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))

class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids):
        # PyTorch loses the gradient of a tensor that a compiled function is given while its collective is under way.
        x = self.embed(ids).clone()
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))

class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.randint(0, TOKENS, (LENGTH + 1,), generator=torch.Generator().manual_seed(i))
"""
)

TITAN = (
    START
    + """
import torch.distributed._functional_collectives as funcol
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module)
from torchdata.stateful_dataloader import StatefulDataLoader

begin, end, tp, compiled = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "compile"
dp = WORLD // tp

def parallelized(model, mesh):
    if tp > 1:
        parallelize_module(model, mesh["tp"], {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)})
        whole = dict(input_layouts=Shard(1), desired_input_layouts=Replicate())
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {
                "attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel(),
                "attention": PrepareModuleInput(**whole), "feed_forward": PrepareModuleInput(**whole),
                **{f"attention.{w}": ColwiseParallel() for w in ("wq", "wk", "wv")},
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w1": ColwiseParallel(), "feed_forward.w3": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1))})
    for i, layer in enumerate(model.layers):
        layer = checkpoint_wrapper(layer)
        if compiled:
            layer.compile(backend="tpu", fullgraph=True)
        model.layers[i] = fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])

class Training(Stateful):
    def __init__(self, model, optimizer, schedule):
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}
    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

mesh = init_device_mesh(DEVICE, (dp, tp), mesh_dim_names=("dp", "tp")) if WORLD > 1 else None
if mesh is None:
    torch.manual_seed(0)
    model = Llama()
    dcp.save(get_model_state_dict(model), checkpoint_id="seed")
else:
    with torch.device("meta"):
        model = Llama()
    parallelized(model, mesh).to_empty(device=DEVICE)
    seed = get_model_state_dict(model)
    dcp.load(seed, checkpoint_id="seed")
    set_model_state_dict(model, seed)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))
part = mesh["dp"].get_local_rank() if mesh else 0
sampler = torch.utils.data.DistributedSampler(Text(), dp, part, shuffle=False)
data = StatefulDataLoader(Text(), batch_size=4 // dp, sampler=sampler)
training = {"training": Training(model, optimizer, schedule), f"data{part}": data}
if begin:
    dcp.load(training, checkpoint_id=f"step-{begin}")

losses, batches = [], iter(data)
for step in range(begin, end):
    text = next(batches).to(DEVICE)
    with loss_parallel():
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        del logits
        loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    loss = loss.detach()
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    losses.append([(funcol.all_reduce(loss, "avg", mesh["dp"]) if mesh else loss).item(), norm.item()])
if mesh is not None and end < 6:
    dcp.save(training, checkpoint_id=f"step-{end}")
if RANK == 0:
    result(losses)
if WORLD > 1:
    dist.destroy_process_group()
"""
)


def assert_close(found: list, wanted: list, tolerance: float = 2e-4) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=tolerance, abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_a_loop_as_torchtitan_has_it(torchrun, needs, mode):
    """FSDP2 and tensor parallel on four ranks, from a checkpoint of one process; two go on without tensor parallel."""
    needs("torchdata")
    [wanted] = torchrun(TITAN, "0", "6", "1", mode, launcher=ONE).results()
    [first] = torchrun(TITAN, "0", "3", "2", mode, ranks=4).results()
    [last] = torchrun(TITAN, "3", "6", "1", mode).results()
    assert_close(first + last, wanted)


TUNE = (
    START
    + """
from safetensors import safe_open
from safetensors.torch import save_file

lora = sys.argv[1] == "lora"

class Adapted(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(columns, rows), requires_grad=False)
        self.a, self.b = nn.Linear(rows, 4, bias=False), nn.Linear(4, columns, bias=False)
    def forward(self, x):
        return F.linear(x, self.weight) + 2 * self.b(self.a(x))

def make():
    model = Llama()
    if lora:
        for layer in model.layers:
            for module, name in ((layer.attention, "wq"), (layer.attention, "wv"), (layer.feed_forward, "w2")):
                columns, rows = getattr(module, name).weight.shape
                setattr(module, name, Adapted(rows, columns))
        for name, p in model.named_parameters():
            p.requires_grad_(".a." in name or ".b." in name)
    return model

if WORLD == 1:
    torch.manual_seed(0)
    model = make()
    for name, p in model.named_parameters():
        nn.init.normal_(p, std=0.2) if p.ndim > 1 else None
    save_file(model.state_dict(), "base.safetensors")
else:
    with torch.device("meta"):
        model = make()
    for i, layer in enumerate(model.layers):
        model.layers[i] = fully_shard(checkpoint_wrapper(layer))
    fully_shard(model).to_empty(device=DEVICE)
    full = {}
    if RANK == 0:
        with safe_open("base.safetensors", "pt") as file:
            full = {name: file.get_tensor(name) for name in file.keys()}
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
sampler = torch.utils.data.DistributedSampler(Text(), WORLD, RANK, shuffle=False)
batches = torch.utils.data.DataLoader(Text(), batch_size=4 // WORLD, sampler=sampler)
losses, total, tokens = [], torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
for i, text in enumerate(batches):
    # As texts of unlike lengths have it: the loss is of tokens that count, whose number is known at the step.
    text = text.to(DEVICE)
    labels = text[:, 1:].masked_fill(text[:, 1:] % 5 == 0, -100)
    loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    total += loss.detach()
    tokens += (labels != -100).sum()
    if i % 2:
        if WORLD > 1:
            dist.all_reduce(total)
            dist.all_reduce(tokens)
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= WORLD / tokens  # of which FSDP made the mean over ranks
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        losses.append([(total / tokens).item(), norm.item()])
        total, tokens = torch.zeros_like(total), torch.zeros_like(tokens)

whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=lora)
state = get_model_state_dict(model, options=whole)
moments = get_optimizer_state_dict(model, optimizer, options=whole)
if RANK == 0:
    assert all(t.device.type == "cpu" for t in state.values())
    assert not lora or all(".a." in name or ".b." in name for name in state)
    sums = [[t.double().square().sum().item(), moments["state"][name]["exp_avg"].double().square().sum().item()]
            for name, t in sorted(state.items())]
    result([losses, sums])
if WORLD > 1:
    dist.destroy_process_group()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_recipe_as_torchtune_has_it(torchrun, needs, mode):
    """LoRA or all parameters with FSDP2 from the meta device; a step has two batches, by the tokens that count."""
    needs("safetensors")
    [(losses, sums)] = torchrun(TUNE, mode, launcher=ONE).results()
    [(found, found_sums)] = torchrun(TUNE, mode).results()
    assert_close(found, losses)
    assert_close(found_sums, sums, 1e-3)


HUGGING_FACE = (
    SAY
    + """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))

def make(scale=1.0):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=33, hidden_size=16, intermediate_size=20, num_hidden_layers=2,
                                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model

def sharded(mesh, scale=1.0):
    model = make(scale).to("tpu")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

WANTED = make().state_dict()

def check(state):
    assert state.keys() == WANTED.keys()
    for name, t in state.items():
        t = t.full_tensor() if hasattr(t, "full_tensor") else t
        torch.testing.assert_close(t.cpu(), WANTED[name], rtol=0, atol=0)

def load(state, folder, **options):
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder, thread_count=2), **options)
    check(state)

FILES = {name: 1 + i % 2 for i, name in enumerate(WANTED)}
SAVED = ["pretrained", "whole", *(f"of-{n}/sharded" for n in (2, 4))]
if WORLD == 1:  # what a process without the device has of all of them
    assert not hasattr(torch, "tpu")
    for folder in SAVED:
        load(make(0.0).state_dict(), folder, no_dist=True)
    for n in (2, 4):
        check(LlamaForCausalLM.from_pretrained(f"of-{n}").state_dict())
    result("loaded")
    sys.exit()

dist.init_process_group("cpu:gloo,tpu:tpu")
torch.tpu.set_device(int(os.environ["LOCAL_RANK"]))
if RANK == 0:
    make().save_pretrained("pretrained", max_shard_size="4KB")
    assert len([f for f in os.listdir("pretrained") if f.endswith(".safetensors")]) > 2
    for n in (2, 4):
        make().config.save_pretrained(f"of-{n}")
meshes = {n: DeviceMesh("tpu", list(range(n))) for n in (2, 4)}
full = get_model_state_dict(sharded(meshes[4]), options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if RANK == 0:
    dcp.save(full, storage_writer=HuggingFaceStorageWriter("whole", fqn_to_index_mapping=FILES), no_dist=True)
for n, mesh in meshes.items():
    if RANK < n:
        writer = HuggingFaceStorageWriter(
            f"of-{n}", fqn_to_index_mapping=FILES, save_distributed=True, enable_consolidation=True)
        dcp.save(sharded(mesh).state_dict(), storage_writer=writer, process_group=mesh.get_group())
dist.barrier()
for n, mesh in meshes.items():
    if RANK < n:
        for folder in SAVED:
            load(sharded(mesh, 0.0).state_dict(), folder, process_group=mesh.get_group())
straight = {}
for file in os.listdir("of-2"):
    if file.endswith(".safetensors"):
        straight.update(load_file(f"of-2/{file}", device="tpu"))
assert {t.device.type for t in straight.values()} == {"tpu"}
check(straight)
result(RANK)
dist.destroy_process_group()
"""
)


@pytest.mark.slow
def test_checkpoints_of_hugging_face(torchrun, needs):
    """Sharded safetensors of transformers, and those that 2 and 4 ranks save, are loaded by 2, by 4 and by one."""
    needs("safetensors", "transformers")
    assert torchrun(HUGGING_FACE, ranks=4).results() == [0, 1, 2, 3]
    assert torchrun(HUGGING_FACE, launcher=ONE, TORCH_DEVICE_BACKEND_AUTOLOAD="0").results() == ["loaded"]


SAVED_BESIDE = (
    SAY
    + """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard

def main():
    dist.init_process_group("cpu:gloo,tpu:tpu")
    torch.tpu.set_device(dist.get_rank())
    model = fully_shard(torch.nn.Linear(8, 8, bias=False).to("tpu"))
    # Memory that is pinned, shared, filled by a thread, without waiting.
    threads = ((False, False, False, False), (True, True, True, False), (True, False, True, True))
    ways = [{"async_stager": DefaultStager(StagingOptions(*options))} for options in threads]
    ways.append({"async_checkpointer_type": AsyncCheckpointerType.PROCESS})
    for i, way in enumerate(ways):
        torch.nn.init.constant_(model.weight, 1.0 + i)
        saved = dcp.async_save({"model": model.state_dict()}, checkpoint_id=f"saved.{i}", **way)
        getattr(saved, "staging_completion", saved).result()
        torch.nn.init.zeros_(model.weight)
        getattr(saved, "upload_completion", saved).result()
    found = []
    for i in range(len(ways)):
        state = model.state_dict()
        dcp.load({"model": state}, checkpoint_id=f"saved.{i}")
        found.append(state["weight"].full_tensor().unique().tolist())
    result(found)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
)


@pytest.mark.slow
def test_checkpoints_that_threads_and_other_processes_save(torchrun):
    """What is saved is what was there when it was copied."""
    assert torchrun(SAVED_BESIDE).results() == [[[1.0], [2.0], [3.0], [4.0]]] * 2
