"""Libraries that choose a device themselves: Accelerate, the Trainer of transformers, Lightning's Trainer and Fabric.

Each trains on the device and on the CPU, in one child process each, and the losses are compared.
"""

import json

import pytest

# The model, data and optimizer that all train; SGD, as Adam hides gradients of the wrong scale.
TOY = """
import json, sys, warnings
import torch
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy

def toy():
    torch.manual_seed(0)
    model = Sequential(Linear(16, 32), ReLU(), Linear(32, 4))
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.DataLoader(data, batch_size=16)
"""

ACCELERATE = (
    TOY
    + """
from accelerate import Accelerator
from accelerate.state import AcceleratorState

def train(precision, cpu):
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(mixed_precision=precision, cpu=cpu)
    model, optimizer, batches = accelerator.prepare(*toy())
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        assert not optimizer.step_was_skipped
    assert x.device.type == loss.device.type == accelerator.device.type
    if accelerator.scaler is not None:
        assert accelerator.scaler.get_scale() == 65536 and accelerator.mixed_precision == "fp16"
        accelerator.save_state(sys.argv[1])
        accelerator.load_state(sys.argv[1])
    return accelerator.device.type, losses

print(json.dumps([[p, train(p, False), train(p, True)] for p in sys.argv[2:]]))
"""
)


def results(done) -> list:
    """The last line of what a child printed."""
    return json.loads(done.stdout.splitlines()[-1])


def assert_agree(precision: str, device: tuple, cpu: tuple, tolerance: float) -> None:
    assert (device[0], cpu[0]) == ("tpu", "cpu"), precision
    assert len(device[1]) == len(cpu[1]) > 0
    assert device[1] == pytest.approx(cpu[1], rel=tolerance, abs=tolerance), precision


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    # On the CPU Accelerate computes "fp16" in float32.
    [("no", 1e-6), pytest.param("bf16", 1e-5, marks=pytest.mark.slow), ("fp16", 1e-4)],
)
def test_an_accelerator_takes_the_device(python, needs, tmp_path, precision, tolerance):
    needs("accelerate")
    [[_, device, cpu]] = results(python(ACCELERATE, str(tmp_path), precision))
    assert_agree(precision, device, cpu, tolerance)


CHOICE = "from accelerate import Accelerator; print(Accelerator(cpu='cpu' in sys.argv).device, flush=True)"


@pytest.mark.parametrize(
    ("code", "env", "device"),
    [
        (CHOICE, {}, "tpu"),
        (f"sys.argv.append('cpu'); {CHOICE}", {}, "cpu"),
        (CHOICE, {"ACCELERATE_TORCH_DEVICE": "cpu"}, "cpu"),
        (CHOICE, {"ACCELERATE_USE_CPU": "true"}, "cpu"),
        (CHOICE, {"OXITORCH_PLATFORM": "abacus"}, "cpu"),
        (f"import accelerate.state, torch; {CHOICE}", {}, "tpu"),
    ],
)
def test_what_the_user_says_is_stronger(python, needs, code, env, device):
    needs("accelerate")
    assert python(f"import sys; {code}", **env).stdout == f"{device}\n"


def test_fp16_is_refused_as_ever_where_it_is_not_ours_to_allow(python, needs):
    needs("accelerate")
    code = "from accelerate import Accelerator; Accelerator(mixed_precision='fp17')"
    assert "Unknown mixed_precision mode: fp17" in python(code, check=False).stderr


def test_the_cpu_platform_is_told_once_unless_it_was_asked_for(python, needs):
    needs("accelerate")
    code = """
from accelerate.state import PartialState
for _ in range(2):
    PartialState._reset_state()
    print(PartialState().device)
"""
    done = python(code)
    assert done.stdout == "tpu\ntpu\n"
    assert done.stderr.count("Accelerate uses device 'tpu', which is XLA on the CPU here") == 1
    assert "hint: `Accelerator(cpu=True)`" in done.stderr
    assert "XLA on the CPU" not in python(code, OXITORCH_PLATFORM="cpu").stderr


LATE = """
import torch
from accelerate import Accelerator
print(Accelerator().device)
import oxitorch
for _ in range(2):
    torch.ones(2, device="tpu").sum().item()
"""


def test_the_first_op_says_that_accelerate_chose_the_cpu_before(python, needs):
    needs("accelerate")
    done = python(LATE, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "cpu\n"
    assert done.stderr.count("Accelerate chose the CPU before oxitorch was there, and now device 'tpu' is used") == 1
    assert "hint: `import oxitorch` before" in done.stderr


@pytest.mark.slow
def test_who_told_accelerate_to_use_the_cpu_is_not_told_and_no_warning_is_fatal(python, needs):
    needs("accelerate")
    done = python(LATE, TORCH_DEVICE_BACKEND_AUTOLOAD="0", ACCELERATE_TORCH_DEVICE="cpu")
    assert "oxitorch" not in done.stderr
    # An error, if that is what warnings are, is shown and keeps nothing from running.
    done = python(LATE, TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONWARNINGS="error::UserWarning")
    assert "Accelerate chose the CPU" in done.stderr


def test_a_version_that_is_not_known_is_told_and_works(python, tmp_path):
    folder = tmp_path / "accelerate"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "state.py").write_text("class PartialState:\n    __repr__ = lambda _: 'theirs'\n")
    code = "import sys, torch; sys.path.insert(0, sys.argv[1]); import accelerate.state as s; print(s.PartialState())"
    done = python(code, str(tmp_path))
    assert done.stdout == "theirs\n"
    assert "this version of accelerate is not known, and does not follow the device" in done.stderr


def test_import_torch_imports_none_of_them(python):
    names = ("accelerate", "transformers", "lightning", "pytorch_lightning", "oxitorch.integrations.accelerate")
    code = f"import sys, torch; print([n for n in {names} if n in sys.modules])"
    assert python(code).stdout == "[]\n"


TRAINER = """
import json, sys
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.ids, self.labels = torch.randint(0, 64, (32, 8)), torch.randint(0, 2, (32,))
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}

def train(precision, cpu):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    ))
    data = Data()
    own = {} if precision == "no" else {precision: True}
    args = TrainingArguments(
        output_dir=sys.argv[1], max_steps=6, per_device_train_batch_size=8, logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, learning_rate=1e-3, use_cpu=cpu, **own,
    )
    trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.accelerator.device.type == args.device.type == next(model.parameters()).device.type
    return args.device.type, [*losses, trainer.evaluate()["eval_loss"]]

print(json.dumps([[p, train(p, False), train(p, True)] for p in sys.argv[2:]]))
"""


@pytest.mark.slow  # it imports for ten seconds
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_the_trainer_of_transformers(python, needs, tmp_path, precision):
    needs("accelerate", "transformers")
    [[_, device, cpu]] = results(python(TRAINER, str(tmp_path), precision, timeout=300))
    # Autocast has other lists for the CPU than for accelerators: there log_softmax gives float32.
    assert_agree(precision, device, cpu, 1e-6 if precision == "no" else 2e-3)


@pytest.mark.slow
def test_the_trainer_of_transformers_with_an_accelerate_that_is_told_to_use_the_cpu(python, needs, tmp_path):
    needs("accelerate", "transformers")
    done = python(TRAINER, str(tmp_path), "no", ACCELERATE_TORCH_DEVICE="cpu", check=False, timeout=300)
    assert done.returncode == 1
    assert "Accelerate uses the CPU, as ACCELERATE_TORCH_DEVICE says, which transformers does not read" in done.stderr
    assert "unset ACCELERATE_TORCH_DEVICE, or say `TrainingArguments(use_cpu=True)`" in done.stderr


LIGHTNING = (
    TOY
    + """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.optimizer, _ = toy()
        self.losses = []
    def training_step(self, batch, _):
        x, y = batch
        assert x.device == self.device
        loss = cross_entropy(self.model(x), y)
        self.losses.append(loss.detach())
        return loss
    def validation_step(self, batch, _):
        self.log("loss", cross_entropy(self.model(batch[0]), batch[1]))
    def configure_optimizers(self):
        return self.optimizer

def train(precision, accelerator):
    module, batches = Module(), toy()[2]
    trainer = lightning.Trainer(
        accelerator=accelerator, precision=precision, max_epochs=2, gradient_clip_val=1.0, logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=sys.argv[1],
    )
    trainer.fit(module, batches, batches)
    losses = [loss.item() for loss in module.losses]
    assert trainer.precision == precision or accelerator == "cpu"
    return trainer.strategy.root_device.type, [*losses, trainer.callback_metrics["loss"].item()]

def train_by_hand(precision, accelerator):
    fabric = lightning.Fabric(accelerator=accelerator, precision=precision)
    model, optimizer, batches = toy()
    model, optimizer = fabric.setup(model, optimizer)
    losses = []
    for x, y in fabric.setup_dataloaders(batches):
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return x.device.type, losses

precisions = ("32-true", "bf16-mixed", "16-mixed")
print(json.dumps([[p, f(p, a), f(p, "cpu")] for f in (train, train_by_hand) for p in precisions for a in sys.argv[2:]]))
"""
)


@pytest.mark.slow  # as the Trainer of transformers
def test_lightning_takes_the_device_in_every_precision(python, needs, tmp_path):
    needs("lightning")
    done = python(LIGHTNING, str(tmp_path), "auto", timeout=300)
    found = results(done)
    assert len(found) == 6
    for precision, device, cpu in found:
        assert_agree(precision, device, cpu, 1e-6 if precision == "32-true" else 2e-3)
    assert 'hint: `accelerator="cpu"`' in done.stderr


@pytest.mark.slow
def test_fabric_takes_the_device(python, needs):
    needs("lightning_fabric")
    code = """
import torch
from lightning_fabric import Fabric
for options in ({}, {"precision": "16-mixed"}, {"accelerator": "tpu"}, {"accelerator": "cpu"}):
    fabric = Fabric(**options)
    model = fabric.setup(torch.nn.Linear(2, 2))
    print(fabric.device, model(fabric.to_device(torch.ones(1, 2))).device, getattr(fabric._precision, "device", None))
"""
    assert python(code).stdout.splitlines() == [
        "tpu:0 tpu:0 None",
        "tpu:0 tpu:0 tpu",
        "tpu:0 tpu:0 None",
        "cpu cpu None",
    ]


@pytest.mark.slow
def test_lightning_knows_the_device_by_its_name(python, needs, tmp_path):
    needs("lightning")
    for precision, device, cpu in results(python(LIGHTNING, str(tmp_path), "tpu", timeout=300)):
        assert_agree(precision, device, cpu, 1e-6 if precision == "32-true" else 2e-3)


@pytest.mark.slow
def test_what_lightning_is_told_is_stronger(python, needs):
    needs("lightning")
    code = """
import lightning, torch
def show(**options):
    print(lightning.Trainer(logger=False, **options).strategy.root_device, lightning.Fabric(**options).device)
show(accelerator="cpu")
show(devices=[0])
show(devices=2)
show(strategy="ddp", devices=1)
try:
    lightning.Trainer(accelerator="cpu", precision="17")
except ValueError as e:
    print(str(e)[:9])
"""
    done = python(code)
    assert done.stdout.splitlines() == ["cpu cpu", *["tpu:0 tpu:0"] * 3, "Precision"]


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_doctor_says_what_they_choose(python, needs, name):
    needs(name)
    done = python("", "-m", "oxitorch", "doctor", "--json", ACCELERATE_TORCH_DEVICE="cpu", check=False)
    [check] = [c for c in json.loads(done.stdout)["checks"] if c["section"] == "Libraries" and c["name"] == name]
    if name == "accelerate":
        assert check["status"] == "warn" and "unset ACCELERATE_TORCH_DEVICE" in check["hint"]
    else:
        assert check["status"] == "ok" and "uses tpu" in check["found"]
