"""safetensors: `load_file(..., device="tpu")` and `safe_open(..., device="tpu")`.

Its reader is compiled and has a list of the devices that it knows. Here it maps the file into the host's memory, and
each tensor is copied to the device when it is asked for. https://huggingface.co/docs/safetensors
"""

import torch


def follow(module) -> None:
    """Takes the place of `safetensors.safe_open` for devices that its reader does not know."""
    theirs = module.safe_open

    def safe_open(filename, framework, device="cpu", **options):
        # What is no device of ours is checked by theirs; a number is a CUDA device to it.
        if isinstance(device, int) or torch.device(device).type != "tpu":
            return theirs(filename, framework, device=device, **options)
        return _Opened(theirs(filename, framework, device="cpu", **options), torch.device(device))

    safe_open.__doc__ = theirs.__doc__
    module.safe_open = safe_open


class _Opened:
    """An open file whose tensors go to a device."""

    def __init__(self, file, device: torch.device):
        self._file, self._device = file, device

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def get_tensor(self, name):
        return self._file.get_tensor(name).to(self._device)

    def get_tensors(self):
        return {name: tensor.to(self._device) for name, tensor in self._file.get_tensors().items()}

    def get_slice(self, name):
        return _Slice(self._file.get_slice(name), self._device)

    def __getattr__(self, name):
        return getattr(self._file, name)


class _Slice:
    """A tensor of which parts are read."""

    def __init__(self, part, device: torch.device):
        self._part, self._device = part, device

    def __getitem__(self, index):
        return self._part[index].to(self._device)

    def __getattr__(self, name):
        return getattr(self._part, name)
