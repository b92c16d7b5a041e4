"""Printing of device tensors.

PyTorch formats a tensor with some two dozen small operations. For the device types it knows to be slow at that it
copies to the CPU first, but the list of those types is fixed in `torch._tensor_str._str_intern`. So that function is
wrapped: device tensors are copied first, of large ones only the corners that will be shown.
"""

import functools

import torch


def install() -> None:
    """Wraps the formatter; a second call does nothing."""
    module = torch._tensor_str
    if not getattr(module._tensor_str, "_oxitorch", False):
        module._tensor_str = _on_cpu(module, module._tensor_str)


# Up to this size the whole tensor is copied: cheaper than compiling programs that cut it.
_WHOLE_BYTES = 16 << 20


def _on_cpu(module, original):
    @functools.wraps(original)
    def _tensor_str(self, indent):
        if self.device.type != "tpu" or self.is_meta:
            return original(self, indent)
        options = module.PRINT_OPTS
        x = self.detach()
        if x.numel() <= options.threshold or x.numel() * x.element_size() <= _WHOLE_BYTES:
            return original(x.to("cpu"), indent)
        corners = _corners(x, options.edgeitems).to("cpu")
        # PyTorch summarises what has more elements than the threshold; the corners must still count as such.
        threshold = options.threshold
        options.threshold = 0
        try:
            return original(corners, indent)
        finally:
            options.threshold = threshold

    _tensor_str._oxitorch = True
    return _tensor_str


def _corners(x, edge: int):
    """What a summary shows of `x`, with one item more between the edges of each dimension that is cut."""
    for d, size in enumerate(x.shape):
        if size > 2 * edge + 1:
            x = torch.cat((x.narrow(d, 0, edge + 1), x.narrow(d, size - edge, edge)), d)
    return x
