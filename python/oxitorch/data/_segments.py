"""Attention and labels that stay within each sequence of a packed row, made on the tensors' own device."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def segment_mask(
    segment_ids: "torch.Tensor", *, causal: bool = False, dtype: "torch.dtype | None" = None
) -> "torch.Tensor":
    """The `attn_mask` of `scaled_dot_product_attention` with which each sequence sees itself alone: block-diagonal.

    Padding, of segment 0, sees padding, so that no position sees nothing, which would make NaN.

    Args:
        segment_ids: integers [..., length], those of `pack_sequences`.
        causal: a position sees none after it. (`is_causal` cannot be given beside a mask.)
        dtype: None for a mask of bool, True where a position is seen; a float dtype for one that is added, with 0 there
            and -inf elsewhere.

    Returns:
        [..., 1, length, length], of which the 1 is for the heads: queries, then keys.

    Raises:
        TypeError: the dtype is no floating point one.
    """
    import torch

    seen = segment_ids.unsqueeze(-1) == segment_ids.unsqueeze(-2)
    if causal:
        at = torch.arange(segment_ids.shape[-1], device=segment_ids.device)
        seen = seen & (at.unsqueeze(-1) >= at)
    seen = seen.unsqueeze(-3)
    if dtype is None or dtype == torch.bool:
        return seen
    if not dtype.is_floating_point:
        raise TypeError(f"segment_mask: expected a floating point dtype or bool, got {dtype}")
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))


def next_token_labels(
    tokens: "torch.Tensor", segment_ids: "torch.Tensor", *, shift: bool = True, ignore_index: int = -100
) -> "torch.Tensor":
    """Labels for predicting the next token, of which none is of another sequence or of padding.

    Args:
        tokens: integers [..., length].
        segment_ids: integers [..., length], 0 where there is padding; for rows of one sequence each, the mask of
            `pad_collate`.
        shift: True for labels beside the logits, as `cross_entropy(logits, labels)` takes them: at each position the
            token after it. False for models that shift them themselves, as those of transformers do: at each position
            its own token, but for the first of each sequence, which nothing before it is to predict.
        ignore_index: what stands where there is nothing to predict.

    Returns:
        As `tokens`.
    """
    import torch

    ids = segment_ids.long()
    same = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != 0)
    labels = torch.where(same, tokens[..., 1:], ignore_index)
    none = torch.full_like(tokens[..., :1], ignore_index)
    return torch.cat((labels, none) if shift else (none, labels), dim=-1)
