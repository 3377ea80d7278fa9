"""fagen as an attention implementation of Hugging Face transformers.

    from fagen.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, attn_implementation="fagen")

An implementation is two functions: one makes the masks of a forward pass, one computes attention. The first, `mask`,
recognises what a kernel expresses (causal or not, a window, sequences side by side or padded) and hands the second,
`attention`, a `Pattern` in place of a tensor; everything else stays the tensor that transformers makes, and is computed
by PyTorch. docs/transformers.md has the rules.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fagen.errors import SpecError
from fagen.interface import attention_with_sink, flash_attn_func

__all__ = ["Pattern", "Span", "attention", "mask", "register"]

log = logging.getLogger("fagen")

_WARNED: set[str] = set()

# Arguments that change what attention computes, and that no kernel knows. A model that passes one gets an error.
_UNSERVED = {
    "position_bias": "a bias added to the scores",
    "head_mask": "a mask of heads",
    "block_table": "paged caches",
}


def register(name: str = "fagen") -> None:
    """Makes `attn_implementation=name` mean fagen's kernels, in this process."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


@dataclass(frozen=True)
class Span:
    """Keys [start, stop) of one batch entry: a sequence that attends to itself only."""

    batch: int
    start: int
    stop: int


@dataclass(frozen=True)
class Pattern:
    """What the keys of a call are visible to, where kernels express it: the mask that `attention` takes.

    Queries stand at the last keys. `spans=None`: every batch entry is one sequence, without padding.
    """

    causal: bool
    window: tuple[int, int] = (-1, -1)  # keys left and right of a query's own position, -1 for no bound
    spans: tuple[Span, ...] | None = None

    @property
    def positional(self) -> bool:
        """Whether it matters at which key a query stands."""
        return self.causal or self.window != (-1, -1)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # closures and values of tensors say it: not in a graph
def mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Pattern | Tensor:
    """What transformers' mask interface asks for: a Pattern where one says it, else the bool tensor (B, 1, Sq, Sk).

    attention_mask (B, any length): which keys are no padding. kwargs: where the queries stand, in the terms of the
    installed version, and hints for other implementations.
    """
    pattern = _pattern(batch_size, kv_length, kv_offset, mask_function, attention_mask, kwargs)
    if pattern is not None:
        return pattern
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    tensor: Tensor = masking_utils.sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    return tensor


def _pattern(
    batch_size: int,
    kv_length: int,
    kv_offset: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    kwargs: Mapping[str, Any],
) -> Pattern | None:
    """The Pattern of what `mask` is asked for, None where there is none."""
    pattern, packed = _recognise(mask_function)
    if pattern is None or (pattern.positional and not _at_last_keys(kv_offset + kv_length, kwargs)):
        return None
    if packed is None and attention_mask is None:
        return pattern
    if packed is not None and attention_mask is not None:
        return None
    if packed is not None:
        spans = _runs(packed) if packed.shape == (batch_size, kv_length) else None
    else:
        assert attention_mask is not None
        valid = functional.pad(attention_mask, (0, max(kv_offset + kv_length - attention_mask.shape[1], 0)))
        spans = _one_run_each(valid[:, kv_offset : kv_offset + kv_length])
    if spans is None:
        return None
    whole = all((span.start, span.stop) == (0, kv_length) for span in spans)
    return pattern if whole else replace(pattern, spans=spans)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pattern | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' attention interface asks for.

    query (B, Hq, Sq, D), key (B, Hk, Sk, D), value (B, Hk, Sk, Dv); s_aux (Hq,) are sinks. Returns o (B, Sq, Hq, Dv),
    and no weights. Rows of padding are zero. Raises SpecError for what neither a kernel nor the fallback computes.
    """
    for name, what in _UNSERVED.items():
        if kwargs.get(name) is not None:
            raise SpecError(
                f'attn_implementation="fagen" has no kernel for {what} ({name}): use "eager" for this model'
            )
    if kwargs.get("output_attentions"):
        _warn('attn_implementation="fagen" returns no attention weights: "eager" does')
    if isinstance(attention_mask, Tensor):
        return _fallback(module, query, key, value, attention_mask, dropout, scaling, softcap, s_aux), None
    if attention_mask is None:
        attention_mask = _pattern_without_mask(module, query, key, sliding_window, is_causal)
    lengths = kwargs.get("cu_seq_lens_q")
    if lengths is not None and len(lengths) > 2 and attention_mask.spans is None:
        raise SpecError("cu_seq_lens_q names several sequences, position_ids one: pass position_ids that start anew")
    compute: Callable[..., Tensor] = partial(
        flash_attn_func if s_aux is None else partial(attention_with_sink, sink=s_aux),
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=attention_mask.causal,
        window_size=attention_mask.window,
        softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask.spans is None:
        return compute(q, k, v), None
    return _each_span(compute, q, k, v, attention_mask), None


def _each_span(compute: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """Attention of each span to itself: one call for all batch entries that have the same one."""
    assert pattern.spans is not None
    batch, seqlen_q, heads, _ = q.shape
    offset = k.shape[1] - seqlen_q
    entries: dict[tuple[int, int], list[int]] = {}
    for span in pattern.spans:
        if span.start < span.stop:
            entries.setdefault((span.start, span.stop), []).append(span.batch)
    o = None
    for (start, stop), rows in entries.items():
        # Without positions every query sees the whole span; with them, those that stand in it do.
        queries = slice(max(start - offset, 0), stop - offset) if pattern.positional else slice(0, seqlen_q)
        if queries.start >= queries.stop:
            continue
        chosen: Any = slice(rows[0], rows[0] + 1) if len(rows) == 1 else slice(None) if len(rows) == batch else rows
        piece = compute(q[chosen, queries], k[chosen, start:stop], v[chosen, start:stop])
        if o is None:
            o = piece.new_zeros(batch, seqlen_q, heads, v.shape[3])
        o[chosen, queries] = piece
    return q.new_zeros(batch, seqlen_q, heads, v.shape[3]) if o is None else o


def _fallback(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """PyTorch's attention, for a mask (B or 1, Hq or 1, Sq, Sk), bool or added to the scores."""
    if mask.dim() != 4:
        raise SpecError(f"the mask has {mask.dim()} dimensions; expected (batch, heads or 1, queries, keys)")
    _warn('attn_implementation="fagen": a mask that is no kernel\'s; PyTorch computes these calls, more slowly')
    if softcap is None and sink is None:
        o: Tensor = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling)[0]
        return o
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    unseen = (scores == -math.inf).all(3, keepdim=True)
    weights = scores.masked_fill(unseen, 0.0).softmax(3, dtype=torch.float32).masked_fill(unseen, 0.0)
    weights = weights[..., : key.shape[2]]
    return (functional.dropout(weights.to(value.dtype), dropout) @ value).transpose(1, 2)


def _pattern_without_mask(
    module: torch.nn.Module, query: Tensor, key: Tensor, sliding_window: int | None, is_causal: bool | None
) -> Pattern:
    """What a model means that makes no mask at all: as "sdpa" has it, an error where that is not certain."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    causal = seqlen_q > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and seqlen_q != seqlen_k:
        raise SpecError(f"no mask says at which of {seqlen_k} keys the {seqlen_q} queries stand")
    if sliding_window is not None and sliding_window < seqlen_k:
        raise SpecError("sliding_window is given without a mask: what it means is not certain")
    return Pattern(causal)


def _warn(message: str) -> None:
    """Once a process, and not while a graph is traced."""
    if not torch.compiler.is_compiling() and message not in _WARNED:
        _WARNED.add(message)
        log.warning(message)


# Recognition. transformers builds masks out of functions of (batch, head, query, key); the closures say which.


def _recognise(function: Callable[..., Any]) -> tuple[Pattern | None, Tensor | None]:
    """The pattern of a mask function, and the tensor (B, S) that numbers its packed sequences; (None, None) where
    unknown."""
    causal, window, packed, remapped = False, (-1, -1), None, False
    for kind, value in _parts(function):
        if kind == "causal":
            causal = True
        elif kind == "remap":
            remapped = True
        elif kind == "packed":
            packed = value
        elif kind in ("left", "both") and window == (-1, -1):
            window = (value - 1, -1) if kind == "left" else (value, value)
        elif kind != "all":
            return None, None
    # Positions that start anew are as good as those in the row, between keys and queries of one sequence.
    if remapped and packed is None:
        return None, None
    return Pattern(causal, window), packed


def _parts(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The conditions of a mask function, all of which must hold: what each says, and the value that it says it with."""
    if function is masking_utils.causal_mask_function:
        yield "causal", None
    elif function is masking_utils.bidirectional_mask_function:
        yield "all", None
    else:
        kind, name = _closures().get(getattr(function, "__code__", None), ("unknown", ""))
        value: Any = inspect.getclosurevars(function).nonlocals[name] if name else None
        if kind == "and":
            for part in value:
                yield from _parts(part)
        elif kind == "remap":
            yield kind, None
            yield from _parts(value)
        else:
            yield kind, value


@cache
def _closures() -> dict[CodeType | None, tuple[str, str]]:
    """The code of each closure that transformers makes: what it says, and its variable that says how much."""
    some = torch.zeros(1, 1, dtype=torch.long)
    causal = masking_utils.causal_mask_function
    makers: dict[tuple[str, str], tuple[str, tuple[Any, ...]]] = {
        ("and", "mask_functions"): ("and_masks", (causal,)),
        ("left", "sliding_window"): ("sliding_window_overlay", (1,)),
        ("both", "sliding_window"): ("sliding_window_bidirectional_overlay", (1,)),
        ("packed", "packed_sequence_mask"): ("packed_sequence_mask_function", (some,)),
        ("remap", "mask_function"): ("remap_positions_for_packed_sequence", (causal, some)),
    }
    # Some are younger than the oldest version that is served.
    present = {key: (getattr(masking_utils, name, None), arguments) for key, (name, arguments) in makers.items()}
    return {maker(*arguments).__code__: key for key, (maker, arguments) in present.items() if maker is not None}


def _at_last_keys(stop: int, kwargs: Mapping[str, Any]) -> bool:
    """Whether the last query stands at the last key, stop - 1. A static cache does not say: its offset is a tensor."""
    if "cache_position" in kwargs:  # as older versions have it
        return bool(kwargs["cache_position"][-1] == stop - 1)
    offset = kwargs["q_offset"]
    return not isinstance(offset, Tensor) and offset + kwargs["q_length"] == stop


def _one_run_each(valid: Tensor) -> tuple[Span, ...] | None:
    """The one run of valid keys of each batch entry, valid (B, S) bool; None where an entry has several."""
    seqlen = valid.shape[1]
    if seqlen == 0:
        return tuple(Span(batch, 0, 0) for batch in range(valid.shape[0]))
    bits = valid.to(torch.uint8)
    first, last = bits.argmax(1), seqlen - 1 - bits.flip(1).argmax(1)
    spans = []
    for batch, (start, end, count) in enumerate(torch.stack([first, last, valid.sum(1)], 1).tolist()):
        if count not in (0, end + 1 - start):
            return None
        spans.append(Span(batch, start, start + count))
    return tuple(spans)


def _runs(numbers: Tensor) -> tuple[Span, ...] | None:
    """The runs of equal numbers of each batch entry, numbers (B, S); None where a number comes back after another."""
    spans = []
    for batch, row in enumerate(numbers.cpu()):
        values, counts = row.unique_consecutive(return_counts=True)
        if len(values.unique()) != len(values):
            return None
        stops = counts.cumsum(0).tolist()
        spans += [Span(batch, start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
    return tuple(spans)
