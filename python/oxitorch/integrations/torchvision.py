"""torchvision: its ops `nms`, `roi_align` and `deform_conv2d`, with gradients.

The core has rows for them under their names (`torchvision::nms`), which it can only bind once torchvision has said what
they are. Its other ops run on the CPU and are counted. https://docs.pytorch.org/vision/stable/ops.html
"""

import torch


def follow(module) -> None:
    """Binds the rows. `module` is torchvision's `extension`, which has loaded the ops, or says that it has none."""
    if module._has_ops():
        torch.ops.oxitorch._bind("torchvision")
