"""`flash_attn.bert_padding`: between padded batches (B, S, ...) and their valid tokens in one row (T, ...)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (T,) of input (N, ...): (T, ...)."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with values (T, ...) in the rows `indices` (T,), which are distinct."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of hidden_states (B, S, ...) that attention_mask (B, S) marks, or unused_mask (B, S) besides: space
    that belongs to a sequence and holds nothing yet. No token is in both.

    Returns the tokens (T, ...); their indices (T,) in the flattened batch; cu_seqlens (B + 1,) int32, where each
    sequence starts; the longest sequence; the number of tokens (B,) int32 that attention_mask alone marks.
    """
    marked = attention_mask.bool()
    present = marked if unused_mask is None else marked | unused_mask.bool()
    seqlens = present.sum(1, dtype=torch.int32)
    tokens, indices = _take(hidden_states, present)
    return tokens, indices, _cumulated(seqlens), _largest(seqlens), marked.sum(1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same for batch entries that hold several sequences one after the other: row b of attention_mask_in_length
    (B, S) lists their lengths, and zeros. Returns the tokens, their indices, cu_seqlens and the longest sequence."""
    lengths = attention_mask_in_length
    present = torch.arange(lengths.shape[1], device=lengths.device) < lengths.sum(1, keepdim=True)
    tokens, indices = _take(hidden_states, present)
    seqlens = lengths[lengths != 0].to(torch.int32)
    return tokens, indices, _cumulated(seqlens), _largest(seqlens)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse: tokens (T, ...) at their indices (T,) of a flattened batch, zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def _take(hidden_states: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    indices = present.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices


def _cumulated(seqlens: Tensor) -> Tensor:
    return pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))


def _largest(seqlens: Tensor) -> int:
    return int(seqlens.max()) if seqlens.numel() else 0
