"""Training that is aware of quantization, in PyTorch's eager mode: what is observed, and by which scale it is rounded."""

import copy

import pytest
import torch
import torch.ao.quantization as quantization
from support import DEVICE, assert_close
from torch import nn

OP = torch.ops.aten._fused_moving_avg_obs_fq_helper


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.quantize, self.plain = quantization.QuantStub(), quantization.DeQuantStub()
        self.conv, self.norm, self.relu, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Linear(16, 5)

    def forward(self, x):
        return self.plain(self.head(self.relu(self.norm(self.conv(self.quantize(x)))).flatten(1)))


def prepared(config):
    torch.manual_seed(0)
    net = Net().train()
    net.qconfig = config
    quantization.fuse_modules_qat(net, [["conv", "norm", "relu"]], inplace=True)
    return quantization.prepare_qat(net, inplace=True)


PLAIN = quantization.FakeQuantize.with_args(
    observer=quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
)
BY_CHANNEL = quantization.FakeQuantize.with_args(
    observer=quantization.MovingAveragePerChannelMinMaxObserver, quant_min=-128, quant_max=127, dtype=torch.qint8,
    qscheme=torch.per_channel_symmetric, ch_axis=0,
)  # fmt: skip
CONFIGS = {
    "x86": quantization.get_default_qat_qconfig("x86"),
    "qnnpack": quantization.get_default_qat_qconfig("qnnpack"),
    "plain": quantization.QConfig(activation=PLAIN, weight=BY_CHANNEL),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_training_is_the_cpus(name):
    nets = {"cpu": prepared(CONFIGS[name])}
    nets[DEVICE] = copy.deepcopy(nets["cpu"]).to(DEVICE)
    optimizers = {device: torch.optim.SGD(net.parameters(), lr=0.01) for device, net in nets.items()}
    g = torch.Generator().manual_seed(1)
    for i in range(5):
        x, y = torch.randn(4, 3, 4, 4, generator=g), torch.randint(0, 5, (4,), generator=g)
        losses = []
        for device, net in nets.items():
            if i == 3:
                net.apply(quantization.disable_observer)
            if i == 4:
                net.apply(quantization.disable_fake_quant)
            loss = nn.functional.cross_entropy(net(x.to(device)), y.to(device))
            optimizers[device].zero_grad()
            loss.backward()
            optimizers[device].step()
            losses.append(loss.detach().cpu())
        assert_close(losses[1], losses[0])
        if i == 0:
            fallbacks = torch.tpu.metrics()["fallbacks"]  # the first call gives the extremes of channels their size
    assert torch.tpu.metrics()["fallbacks"] == fallbacks
    for (at, expected), got in zip(nets["cpu"].state_dict().items(), nets[DEVICE].state_dict().values(), strict=True):
        assert got.dtype == expected.dtype, at
        assert_close(got, expected)


RANGES = [
    (-1, 1),
    (0, 1),
    (-2, 0),
    (0.5, 3),
    (-3, -1),
    (-1e-4, 2e-4),
    (0, 1e-6),
    (-1e-6, 0),
    (-1e-6, 1e-6),
    (0, 0),
    (-7, 0.1),
]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("least", "most"), [(0, 255), (-128, 127), (0, 127), (-8, 7)])
def test_scales_are_the_cpus(least, most, symmetric):
    rows = torch.stack([torch.linspace(low, high, 9) for low, high in RANGES])
    n = len(RANGES)

    def observe(device, by_channel, x):
        size = [n] if by_channel else [1]
        state = [
            torch.full(size, float("inf")),
            torch.full(size, -float("inf")),
            torch.ones(size),
            torch.zeros(size, dtype=torch.int32),
        ]
        on = torch.ones(1, dtype=torch.long)
        state, on, x = [t.to(device) for t in state], on.to(device), x.to(device)
        for scale in (1, 3):
            out = OP(x * scale, on, on, *state, 0.1, least, most, 0, by_channel, symmetric)
        return *state, *out

    for by_channel, xs in ((True, [rows]), (False, rows)):
        for x in xs:
            for got, expected in zip(observe(DEVICE, by_channel, x), observe("cpu", by_channel, x), strict=True):
                assert_close(got, expected)


def test_what_is_out_of_reach_is_an_error():
    x, scale = torch.ones(2, 3, device=DEVICE), torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="`zero_point` must be between"):
        zero = torch.full((2,), 9, dtype=torch.int32, device=DEVICE)
        torch.fake_quantize_per_channel_affine(x, scale, zero, 0, 0, 7).cpu()
    torch.tpu.synchronize()
    with pytest.raises(RuntimeError, match="`zero_point` must be between"):
        torch.fake_quantize_per_tensor_affine(x, 0.1, 9, 0, 7)


def test_levels_of_any_size_are_those_of_the_cpu():
    x = torch.linspace(-3, 3, 7)
    for least, most in ((-(2**31), 2**31 - 1), (-(2**40), 2**40), (-(2**63), 2**63 - 1)):
        expected = torch.fake_quantize_per_tensor_affine(x, 0.5, 0, least, most)
        actual = torch.fake_quantize_per_tensor_affine(x.to(DEVICE), 0.5, 0, least, most)
        torch.testing.assert_close(actual.cpu(), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack", "x86"])
def test_a_step_that_observes_is_one_program(backend, fused):
    """Also where the first call gives the observers of channels their size."""
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    def trained(device, wrap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))
        model.qconfig = get_default_qat_qconfig(backend)
        model = prepare_qat(model.train()).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        @wrap
        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        g = torch.Generator().manual_seed(1)
        losses, made = [], []
        for _ in range(4):
            before = torch.tpu.metrics()["programs"]
            losses.append(step(torch.randn(3, 2, 4, 4, generator=g).to(device)).item())
            made.append(torch.tpu.metrics()["programs"] - before)
        return losses, made, {k: v for k, v in model.state_dict().items() if "fake_quant" in k}

    torch.tpu.reset_metrics()
    want, _, on_cpu = trained("cpu", lambda step: step)
    got, made, on_device = trained(DEVICE, torch.tpu.jit)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-5)
    assert made[2:] == [0, 0] and torch.tpu.metrics()["fallbacks"] == {}
    for name, value in on_cpu.items():
        torch.testing.assert_close(on_device[name].cpu(), value, rtol=1e-4, atol=1e-5, msg=name)
