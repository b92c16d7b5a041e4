"""Libraries that start their own process groups: Accelerate, the Trainer of transformers, Lightning and Fabric.

Each trains in two processes on the device, and in one on the CPU with the same global batches.
"""

import pytest

# One write, as processes share the output.
SAY = """
import json, sys

def result(value):
    sys.stdout.write("RESULT " + json.dumps(value) + "\\n")
    sys.stdout.flush()
"""

START = (
    SAY
    + """
import os
import torch
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
MODE = sys.argv[1]

def toy():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    return Sequential(Linear(16, 32), ReLU(), Linear(32, 4)), data
"""
)

ACCELERATE = (
    START
    + """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import gather_object

precision, _, sharded = MODE.partition(" ")
options = {}
if sharded:
    version = int(sharded[-1])
    own = {"use_orig_params": True} if version == 1 else {}
    options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
        fsdp_version=version, min_num_params=100, auto_wrap_policy="size_based_wrap", **own)
accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2, cpu="cpu" in sys.argv, **options)
model, data = toy()
model, optimizer, batches = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(data, batch_size=16 // WORLD))
losses = []
for _ in range(2):
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x).float(), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
assert len(accelerator.gather_for_metrics(y)) == 16
assert gather_object([accelerator.process_index]) == list(range(WORLD))
folder = os.path.abspath("saved")
accelerator.save_state(folder)
accelerator.wait_for_everyone()
if precision != "fp16":  # whose scaler Accelerate cannot load once it was used with FSDP2
    accelerator.load_state(folder)
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    sums = [v.double().sum().item() for v in state.values()]
    result([accelerator.device.type, accelerator.num_processes, losses, sums])
accelerator.end_training()
"""
)


def assert_agree(device, cpu, tolerance: float) -> None:
    """Device, number of processes, and numbers in lists."""
    assert device[:2] == ["tpu", 2] and cpu[:2] == ["cpu", 1]
    for ours, theirs in zip(device[2:], cpu[2:], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)


ONE = ()  # no launcher: the script alone


@pytest.mark.parametrize(
    ("mode", "tolerance"),
    [
        ("no", 1e-5),
        pytest.param("bf16", 2e-2, marks=pytest.mark.slow),
        pytest.param("fp16", 2e-3, marks=pytest.mark.slow),
        pytest.param("no fsdp2", 1e-5, marks=pytest.mark.slow),
        pytest.param("bf16 fsdp2", 2e-2, marks=pytest.mark.slow),
        pytest.param("fp16 fsdp2", 5e-3, marks=pytest.mark.slow),
        pytest.param("no fsdp1", 1e-5, marks=pytest.mark.slow),
        pytest.param("fp16 fsdp1", 5e-3, marks=pytest.mark.slow),
    ],
)
def test_an_accelerator_of_two_processes(torchrun, needs, mode, tolerance):
    needs("accelerate")
    [device] = torchrun(ACCELERATE, mode).results()
    [cpu] = torchrun(ACCELERATE, "no", "cpu", launcher=ONE).results()
    assert_agree(device, cpu, tolerance)


@pytest.mark.slow
def test_accelerate_launch_starts_two_processes(torchrun, needs):
    needs("accelerate")
    code = f"""{SAY}
from accelerate import Accelerator
state = Accelerator().state
result([state.process_index, state.num_processes, str(state.device)])
"""
    for options in (["--num_processes", "2"], ["--multi_gpu", "--num_processes", "2"]):
        launcher = ["-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0", *options]
        assert torchrun(code, launcher=launcher).results() == [[0, 2, "tpu:0"], [1, 2, "tpu:1"]]
    alone = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "1"]
    assert torchrun(code, launcher=alone).results() == [[0, 1, "cpu"]]


@pytest.mark.slow
def test_what_accelerate_is_told_is_stronger_in_several_processes(torchrun, needs):
    needs("accelerate")
    code = f"""{SAY}
from accelerate import Accelerator
state = Accelerator(cpu="cpu" in sys.argv).state
result([state.process_index, state.num_processes, str(state.device)])
"""
    assert torchrun(code, "cpu").results() == [[0, 2, "cpu:0"], [1, 2, "cpu:0"]]
    assert torchrun(code, ACCELERATE_USE_CPU="true").results() == [[0, 2, "cpu:0"], [1, 2, "cpu:0"]]
    assert torchrun(code, ACCELERATE_TORCH_DEVICE="tpu").results() == [[0, 2, "tpu:0"], [1, 2, "tpu:1"]]


TRAINER = (
    START
    + """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(0, 64, (48, 16), generator=torch.Generator().manual_seed(5))
    def __len__(self):
        return 48
    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}

def train(folder, resume):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=1, eos_token_id=2))
    own = {name: True for name in MODE.split() if name in ("bf16", "fp16", "gradient_checkpointing", "torch_compile")}
    if "fsdp " in MODE:
        own.update(fsdp="full_shard auto_wrap",
                   fsdp_config={"version": int(MODE[-1]), "transformer_layer_cls_to_wrap": ["GPT2Block"]})
    args = TrainingArguments(
        output_dir=folder, max_steps=8, per_device_train_batch_size=8 // WORLD, per_device_eval_batch_size=8 // WORLD,
        gradient_accumulation_steps=2, logging_steps=1, save_strategy="steps", save_steps=4, eval_strategy="steps",
        eval_steps=4, report_to=[], disable_tqdm=True, learning_rate=1e-3, use_cpu="cpu" in sys.argv, **own)
    trainer = Trainer(model=model, args=args, train_dataset=Data(), eval_dataset=Data(),
                      compute_metrics=lambda p: {"n": len(p.label_ids)})
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    assert all(entry["eval_n"] == 48 for entry in history if "eval_n" in entry)
    losses = [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]
    if "fsdp" not in MODE:
        prompt = torch.tensor([[1, 5, 9]], device=args.device)
        whole = trainer.accelerator.unwrap_model(trainer.model)
        losses += whole.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist()
    trainer.save_model(folder + "/final")
    return [args.device.type, args.world_size, losses]

out = f"out-{WORLD}"
first = train(out, None)
again = train(out, f"{out}/checkpoint-4")
if int(os.environ.get("RANK", "0")) == 0:
    result(first)
    # What it says of the first four steps it has from the checkpoint.
    assert again[2][-6:] == first[2][-6:], (again, first)
if WORLD > 1:
    torch.distributed.destroy_process_group()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "tolerance"),
    [
        ("no", 1e-5),
        ("bf16 gradient_checkpointing", 2e-3),
        ("fp16", 2e-3),
        ("torch_compile", 1e-5),
        ("fsdp 2", 1e-5),
        ("bf16 fsdp 2", 2e-2),
        ("fsdp 1", 1e-5),
    ],
)
def test_the_trainer_of_transformers_in_two_processes(torchrun, needs, mode, tolerance):
    needs("accelerate", "transformers")
    [device] = torchrun(TRAINER, mode).results()
    [cpu] = torchrun(TRAINER, "fsdp" if "fsdp" in mode else "no", "cpu", launcher=ONE).results()
    assert_agree(device, cpu, tolerance)


LIGHTNING = (
    START
    + """
import lightning

strategy, precision, accelerator, processes, kind = MODE.split()
processes = int(processes)

def batches(data):
    return torch.utils.data.DataLoader(data, batch_size=8 // processes)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.data = toy()
    def training_step(self, batch, _):
        x, y = batch
        assert x.device == self.device
        loss = cross_entropy(self.model(x), y)
        self.log("train", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss
    def validation_step(self, batch, _):
        self.log("loss", cross_entropy(self.model(batch[0]), batch[1]), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trainer():
    module = Module()
    trainer = lightning.Trainer(
        accelerator=accelerator, strategy=strategy, devices=processes, precision=precision, max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, batches(module.data), batches(module.data))
    found = [trainer.callback_metrics[name].item() for name in ("loss", "train")]
    trainer.save_checkpoint("saved.ckpt")
    return trainer.is_global_zero, [trainer.strategy.root_device.type, trainer.world_size, found]

def by_hand():
    fabric = lightning.Fabric(accelerator=accelerator, strategy=strategy, devices=processes, precision=precision)
    fabric.launch()
    model, data = toy()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for x, y in fabric.setup_dataloaders(batches(data)):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
    return fabric.is_global_zero, [fabric.device.type, fabric.world_size, losses]

if __name__ == "__main__":
    is_first, found = trainer() if kind == "trainer" else by_hand()
    if is_first:
        result(found)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "fabric"])
@pytest.mark.parametrize(
    ("mode", "tolerance"),
    [
        ("ddp 32-true auto", 1e-5),
        ("auto bf16-mixed tpu", 5e-3),
        ("ddp 16-mixed auto", 2e-3),
        ("fsdp 32-true tpu", 1e-5),
        ("fsdp bf16-mixed auto", 5e-3),
        ("fsdp 16-mixed auto", 5e-3),
    ],
)
def test_lightning_in_two_processes(torchrun, needs, mode, kind, tolerance):
    needs("lightning")
    [device] = torchrun(LIGHTNING, f"{mode} 2 {kind}").results()
    # Its sampler deals the batches out otherwise than one process has them.
    [[_, _, losses]] = torchrun(LIGHTNING, f"ddp 32-true cpu 2 {kind}").results()
    assert_agree(device, ["cpu", 1, losses], tolerance)


RESUME = (
    START
    + """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

accelerator = "cpu" if "cpu" in sys.argv else "auto"
sharded = MODE == "model_parallel"
found = []

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.data = toy()
    def configure_model(self):
        if sharded:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
    def training_step(self, batch, _):
        loss = cross_entropy(self.model(batch[0]), batch[1])
        found.append(loss.item())
        return loss
    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data, batch_size=8, shuffle=True, num_workers=1)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

def fit(epochs, path=None):
    lightning.seed_everything(1, verbose=False)
    saves = ModelCheckpoint("saved-" + accelerator, filename="{epoch}", save_top_k=-1)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if sharded else MODE
    trainer = lightning.Trainer(
        accelerator=accelerator, strategy=strategy, devices=2, max_epochs=epochs, callbacks=[saves], logger=False,
        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Module(), ckpt_path=path)
    return trainer

fit(2)
trainer = fit(3, f"saved-{accelerator}/epoch=0.ckpt")
assert len(found) == 16 and (trainer.current_epoch, trainer.global_step) == (3, 12)
result([trainer.global_rank, trainer.strategy.root_device.type, found])
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "model_parallel"])
def test_lightning_resumes_in_two_processes(torchrun, needs, strategy):
    needs("lightning")
    device = torchrun(RESUME, strategy).results()
    cpu = torchrun(RESUME, "ddp", "cpu").results()
    for (rank, kind, ours), (same, host, theirs) in zip(device, cpu, strict=True):
        assert (rank, kind, host) == (same, "tpu", "cpu")
        assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.slow
def test_lightning_starts_the_processes_itself(torchrun, needs):
    needs("lightning")
    [device] = torchrun(LIGHTNING, "ddp 32-true auto 2 trainer", launcher=ONE).results()
    [cpu] = torchrun(LIGHTNING, "ddp 32-true cpu 2 trainer", launcher=ONE).results()
    assert_agree(device, ["cpu", 1, cpu[2]], 1e-5)


def test_processes_of_mp_spawn_have_a_device_each(torchrun):
    code = f"""{SAY}
import torch
import torch.distributed as dist

def main(rank, world):
    store = dist.FileStore("store", world)
    dist.init_process_group(store=store, rank=rank, world_size=world)
    torch.tpu.set_device(rank)
    x = torch.full((3,), float(rank), device=f"tpu:{{rank}}")
    dist.all_reduce(x)
    result([rank, *x.tolist()])
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=(2,), nprocs=2)
"""
    assert torchrun(code, launcher=ONE).results() == [[0, 1, 1, 1], [1, 1, 1, 1]]


RESUMED = (
    SAY
    + """
import os
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

WORLD, MODE = int(os.environ.get("WORLD_SIZE", "1")), sys.argv[1]
DEVICE = "cpu" if MODE == "cpu" else "tpu"
if WORLD > 1:
    dist.init_process_group("cpu:gloo,tpu:tpu")
    torch.tpu.set_device(dist.get_rank())

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.linspace(0, 1, 8) * (i % 7), torch.tensor([float(i % 3)])

def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    if os.path.exists("start.safetensors"):
        model.load_state_dict(load_file("start.safetensors"))
    model.to(DEVICE)
    if WORLD > 1:
        fully_shard(model)
    sampler = torch.utils.data.DistributedSampler(Numbers(), WORLD, dist.get_rank() if WORLD > 1 else 0, shuffle=False)
    data = StatefulDataLoader(Numbers(), batch_size=8 // WORLD, sampler=sampler, num_workers=1)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05), data

def train(model, optimizer, batches, steps):
    losses = []
    for _, (x, y) in zip(range(steps), batches):
        loss = (model(x.to(DEVICE)) - y.to(DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / WORLD
        if WORLD > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
    return losses

model, optimizer, data = make()
batches = iter(data)
losses = train(model, optimizer, batches, 3)
position = data.state_dict()
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.save(state, checkpoint_id=f"saved-{WORLD}")
straight = train(model, optimizer, batches, 4)

model, optimizer, data = make()
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.load(state, checkpoint_id=f"saved-{WORLD}")
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
data.load_state_dict(position)
again = train(model, optimizer, iter(data), 4)
torch.testing.assert_close(again, straight, rtol=1e-5, atol=1e-6)  # a program that was compiled better rounds otherwise
if WORLD == 1 or dist.get_rank() == 0:
    result(["cpu" if MODE == "cpu" else "tpu", WORLD, losses + straight])
if WORLD > 1:
    dist.destroy_process_group()
"""
)


@pytest.mark.slow
def test_a_stateful_data_loader_and_a_checkpoint_resume(torchrun, needs):
    needs("torchdata", "safetensors")
    [device] = torchrun(RESUMED, "tpu").results()
    [cpu] = torchrun(RESUMED, "cpu", launcher=ONE).results()
    assert_agree(device, cpu, 1e-5)
