"""flash-attention 2's calls: the spec follows from the arguments, its kernels are built on first use.

Arguments, defaults, layouts and results are those of the `flash_attn` package; docs/flash-attention.md lists what
differs. What is computed is SEMANTICS.md's definition.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from fagen import reference
from fagen.call import DTYPES, check_of_entries, check_one_place, philox_state
from fagen.errors import SpecError
from fagen.ops import Attention
from fagen.spec import HEAD_DIM_STEP, AttentionSpec

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_SPEC_DTYPES = {dtype: name for name, dtype in DTYPES.items()}

# head dims as the kernel has them, dtype, then causal, window, softcap, alibi, sink, dropout, varlen, split_kv, paged,
# backward, deterministic
_Key: TypeAlias = tuple[int, int, torch.dtype, bool, bool, bool, bool, bool, bool, bool, bool, bool, bool, bool]

# One Attention for what calls of one kind derive: a lookup is all that a call pays for not naming its spec.
_ATTENTIONS: dict[_Key, Attention] = {}

# The same, as torch.compile can read it while it traces: an attribute is looked up when its turn comes, where the whole
# of a dictionary is taken note of before.
_TRACED = SimpleNamespace()

Result: TypeAlias = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q over k and v.

    q: (B, Sq, Hq, D), k: (B, Sk, Hk, D), v: (B, Sk, Hk, Dv), float16 or bfloat16 (float32 under autocast, which casts
    them), Hq a multiple of Hk, head dims up to 256; those that are no multiple of 8 are padded with zeros and cut.
    dropout_p: probability in [0, 1) that a softmax weight is dropped; 0 is off. The mask follows PyTorch's generator.
    softmax_scale: positive; default D ** -0.5 of the true D.
    causal: query i sees keys up to i + Sk - Sq.
    window_size: (left, right), query i sees keys from i + Sk - Sq - left to i + Sk - Sq + right, -1 for no bound.
    softcap: scores become softcap * tanh(score / softcap); 0 or less is off.
    alibi_slopes: float32 (Hq,) or (B, Hq); scores lose slope * |i + Sk - Sq - j|. Slopes get no gradient.
    deterministic: bitwise equal gradients from run to run.

    Returns o (B, Sq, Hq, Dv); with return_attn_probs (o, softmax_lse, S_dmask): softmax_lse (B, Hq, Sq) float32,
    natural logarithm, -inf for a row that sees nothing; S_dmask, for tests, as `dropped_probabilities` has it, empty
    without dropout.

    Raises SpecError for tensors or values that fit no kernel, BuildError where a compiler fails.
    """
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise SpecError(
            f"q, k and v have the shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}; "
            "expected (batch, seqlen, heads, head_dim)"
        )
    return _attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        {},
    )


def attention_with_sink(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """`flash_attn_func` with `sink` (Hq,), one more score of each row whose key has no value; not one of its calls.
    Differentiable in the sink too."""
    o: Tensor = _attend(
        *(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, None, deterministic, False),
        {"sink": sink},
    )
    return o


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q (B, Sq, Hq, D) over kv (B, Sk, 2, Hk, D), keys and values of one tensor."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise SpecError(f"kv has the shape {tuple(kv.shape)}; expected (batch, seqlen, 2, heads, head_dim)")
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv (B, S, 3, H, D), queries, keys and values of one tensor."""
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        raise SpecError(f"qkv has the shape {tuple(qkv.shape)}; expected (batch, seqlen, 3, heads, head_dim)")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
) -> Any:
    """`flash_attn_func` of packed sequences, each over its own keys.

    q: (Tq, Hq, D), k: (Tk, Hk, D), v: (Tk, Hk, Dv), the rows of all sequences one after the other.
    cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), where each begins, and the end of the last. Sequences may be empty.
    max_seqlen_q, max_seqlen_k: lengths that no sequence exceeds.
    seqused_k: int32 (B,), how many keys of each sequence count.
    block_table: int32 (B, pages); k and v are then (pages of all, size of a page, Hk, ...), the size a power of two
    from 16 on, the keys of sequence b from i * size on lie in page block_table[b, i], and cu_seqlens_k says only how
    many there are. Without gradients.

    Returns o (Tq, Hq, Dv); with return_attn_probs (o, softmax_lse, S_dmask): softmax_lse (Hq, Tq), S_dmask empty.
    Rows of no sequence are not written.

    Raises SpecError as `flash_attn_func`.
    """
    dims_k = 3 if block_table is None else 4
    if q.dim() != 3 or k.dim() != dims_k or v.dim() != dims_k:
        keys = "" if block_table is None else ", and k and v with a block_table (pages, page size, heads, head_dim)"
        raise SpecError(
            f"q, k and v have the shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}; "
            f"expected (total, heads, head_dim){keys}"
        )
    packed = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "block_table": block_table,
    }
    return _attend(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        packed,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`flash_attn_varlen_func` of q (Tq, Hq, D) over kv (Tk, 2, Hk, D), keys and values of one tensor."""
    if kv.dim() != 4 or kv.shape[1] != 2:
        raise SpecError(f"kv has the shape {tuple(kv.shape)}; expected (total, 2, heads, head_dim)")
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any
) -> Any:
    """`flash_attn_varlen_func` of qkv (T, 3, H, D), queries, keys and values of one tensor."""
    if qkv.dim() != 4 or qkv.shape[1] != 3:
        raise SpecError(f"qkv has the shape {tuple(qkv.shape)}; expected (total, 3, heads, head_dim)")
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | Tensor = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of a few new queries over a cache of keys and values, in parts that run beside each other.

    q: (B, Sq, Hq, D), k_cache: (B, Smax, Hk, D), v_cache: (B, Smax, Hk, Dv).
    block_table: int32 (B, pages); the caches are then (pages of all, size of a page, Hk, ...), the size a power of two
    from 16 on, and the keys of entry b from i * size on lie in page block_table[b, i].
    k, v: (B, Snew, Hk, ...), written to the caches behind the first cache_seqlens rows, and part of what q sees.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2): the rotary embedding of k, and of q at the positions of the new
    keys, or all at the first of them where there is neither causal nor a window; of (even, odd) pairs of columns with
    rotary_interleaved, else of the two halves.
    cache_seqlens: int32 (B,) or one number: how many keys of each entry count; default all.
    cache_batch_idx: int32 (B,): which entry of contiguous caches is that of each query; default its own.
    cache_leftpad: int32 (B,): the first row of each entry that is a key; cache_seqlens counts those before it too.
    num_splits: parts of the keys; 0 is what keeps the card busy.
    The others as in `flash_attn_func`. Nothing is read back to the host, so room for new keys is not checked: on a GPU
    a full cache is an error of the device. There are no gradients.

    Returns o (B, Sq, Hq, Dv); with return_softmax_lse (o, softmax_lse), (B, Hq, Sq).

    Raises SpecError as `flash_attn_func`.
    """
    if (k is None) != (v is None):
        raise SpecError("k and v go together: pass both, or neither")
    if q.dim() != 4 or k_cache.dim() != 4 or v_cache.dim() != 4:
        raise SpecError(
            f"q, k_cache and v_cache have the shapes {tuple(q.shape)}, {tuple(k_cache.shape)} and "
            f"{tuple(v_cache.shape)}; expected (batch, seqlen, heads, head_dim)"
        )
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, k_cache, v_cache)):
        raise SpecError("flash_attn_with_kvcache has no gradients: call it under torch.no_grad()")
    batch, device = q.shape[0], q.device
    used: Tensor | None = None
    if isinstance(cache_seqlens, Tensor):
        used = cache_seqlens.contiguous()
    elif cache_seqlens is not None:
        if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, int):
            raise SpecError(f"cache_seqlens={cache_seqlens!r}; expected an integer or int32 ({batch},) on {device}")
        used = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    if (rotary_cos is None) != (rotary_sin is None):
        raise SpecError("rotary_cos and rotary_sin go together: pass both, or neither")
    # What the host can check, before the caches are written to.
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise SpecError(f"k_cache is {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}: equal but for the last")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (batch, None if k is None else k.shape[1], *cache.shape[2:])
        if new is not None and (tuple(new.shape) != wanted or (new.dtype, new.device) != (cache.dtype, cache.device)):
            raise SpecError(
                f"{name} is {new.dtype} {tuple(new.shape)} on {new.device}; "
                f"{name}_cache wants {cache.dtype} {wanted} on {cache.device}"
            )
    per_entry = {"cache_seqlens": used, "cache_leftpad": cache_leftpad, "cache_batch_idx": cache_batch_idx}
    for name, value in per_entry.items():
        check_of_entries(name, value, batch, device)
    check_one_place(cache_batch_idx, block_table)
    if used is None and block_table is not None:
        raise SpecError("block_table is given: pass cache_seqlens, how many keys each entry has")
    if k is not None and v is not None:
        if used is None:
            raise SpecError("k and v are given: pass cache_seqlens, the row of the caches where they go")
        places = used.long()[:, None] + torch.arange(k.shape[1], device=device)
        if rotary_cos is not None and rotary_sin is not None:
            of_queries = torch.arange(q.shape[1], device=device)
            left, right = _bounds(window_size)
            if not causal and left < 0 and right < 0:
                of_queries = torch.zeros_like(of_queries)
            q = _rotated(q, rotary_cos, rotary_sin, used.long()[:, None] + of_queries, rotary_interleaved)
            k = _rotated(k, rotary_cos, rotary_sin, places, rotary_interleaved)
        entries = (torch.arange(batch, device=device) if cache_batch_idx is None else cache_batch_idx.long())[:, None]
        if block_table is not None:
            size = k_cache.shape[1]
            entries, places = block_table.long()[entries, places // size], places % size
        k_cache[entries, places] = k
        v_cache[entries, places] = v
        used = used + k.shape[1]
    elif rotary_cos is not None or rotary_sin is not None:
        raise SpecError("a rotary embedding goes with new keys: pass k and v")
    result = _attend(
        q,
        k_cache,
        v_cache,
        0.0,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        False,
        return_softmax_lse,
        {
            "seqused_k": used,
            "num_splits": num_splits or None,
            "block_table": block_table,
            "leftpad_k": cache_leftpad,
            "cache_batch_idx": cache_batch_idx,
        },
    )
    return result[:2] if return_softmax_lse else result


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (B, S, H, D) with the rotary embedding of `positions` (B, S) on its first 2 * cos.shape[1] columns."""
    dim = 2 * cos.shape[1]
    if dim > x.shape[3]:
        raise SpecError(f"rotary_cos has {cos.shape[1]} columns, for {dim} of a head dim of {x.shape[3]}")
    c, s = (table[positions][:, :, None].float() for table in (cos, sin))
    turned, rest = x[..., :dim].float(), x[..., dim:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, 3)
    parts = a * c - b * s, a * s + b * c
    joined = torch.stack(parts, 4).flatten(3) if interleaved else torch.cat(parts, 3)
    return torch.cat((joined.to(x.dtype), rest), 3)


def _bounds(window_size: Sequence[int] | Tensor) -> tuple[int, int]:
    """The window's left and right. SpecError for what is no pair."""
    pair = window_size.tolist() if isinstance(window_size, Tensor) else window_size
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise SpecError(f"window_size={pair!r}: expected (left, right), -1 for no bound")
    left, right = pair
    return left, right


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int] | Tensor,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    given: dict[str, Any],
) -> Any:
    """What the functions share, of tensors (..., heads, head_dim). `given`: what packed sequences or a cache add."""
    if q.dtype not in _SPEC_DTYPES:
        q, k, v = _cast(q, k, v)
    head_dim, dim_v = q.shape[-1], v.shape[-1]
    if head_dim % HEAD_DIM_STEP or dim_v % HEAD_DIM_STEP:
        if k.shape[-1] != head_dim:
            raise SpecError(f"k has head dim {k.shape[-1]}, q has {head_dim}: must be equal")
        softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        q, k, v = (_padded(x) for x in (q, k, v))
        result = _attend(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            given,
        )
        return (result[0][..., :dim_v], *result[1:]) if return_attn_probs else result[..., :dim_v]

    left, right = _bounds(window_size)
    if right == 0:  # the diagonal bounds, as causal says it
        causal, right = True, -1
    window = left >= 0 or (right >= 0 and not causal)
    capped = not softcap <= 0  # NaN is not off: the kernel's checks refuse it
    sink = given.get("sink")
    backward = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sink is not None and sink.requires_grad)
    )
    key = (
        head_dim,
        dim_v,
        q.dtype,
        bool(causal),
        window,
        capped,
        alibi_slopes is not None,
        sink is not None,
        dropout_p != 0,
        "cu_seqlens_q" in given,
        "num_splits" in given,
        given.get("block_table") is not None,
        backward,
        backward and bool(deterministic),
    )
    if torch.compiler.is_compiling():
        attention = getattr(_TRACED, _attribute(key))
    else:
        attention = _ATTENTIONS.get(key) or _derive(key)
    values: dict[str, Any] = {"softmax_scale": softmax_scale, **given}
    if window:
        values["window"] = (left, right)
    if capped:
        values["softcap"] = softcap
    if alibi_slopes is not None:
        values["alibi_slopes"] = alibi_slopes
    if dropout_p != 0:
        values["dropout_p"] = dropout_p
        if return_attn_probs:
            values["seed"] = philox_state(None, q.device)
    # Every row that a kernel reads is contiguous; strides of the other dimensions may be anything.
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if not return_attn_probs:
        return attention(q, k, v, **values)
    o, lse = attention(q, k, v, return_lse=True, **values)
    if dropout_p == 0 or given:
        return o, lse, q.new_empty(0)
    return o, lse, dropped_probabilities(q, k, causal=bool(causal), **values)


def dropped_probabilities(q: Tensor, k: Tensor, *, dropout_p: float, seed: Tensor, **values: Any) -> Tensor:
    """What tests of dropout look at: (B, Hq, Sq, Sk) in q's dtype, the softmax of each row over the row's largest
    entry, negative where dropout drops it. seed: (seed, offset) of the call. Computed in float64 from the definition,
    not by the kernel."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_k = k.shape[1:3]
    # With the identity for v, o is the softmax itself.
    identity = torch.eye(seqlen_k, dtype=torch.float64, device=q.device)[None, :, None].expand(batch, -1, heads_k, -1)
    with torch.no_grad():
        p = reference.attention(q, k, identity, return_lse=False, **values).transpose(1, 2)
        p = p / p.amax(3, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        first, offset = seed.tolist()
        keep = reference.dropout_mask(first, offset, batch, heads, seqlen_q, seqlen_k, dropout_p, q.device)
        return torch.where(keep, p, -p).to(q.dtype)


def _derive(key: _Key) -> Attention:
    """The Attention of a key that no call had before, memoised."""
    (
        head_dim,
        dim_v,
        dtype,
        causal,
        window,
        softcap,
        alibi,
        sink,
        dropout,
        varlen,
        split_kv,
        paged,
        backward,
        deterministic,
    ) = key
    spec = AttentionSpec(
        head_dim=head_dim,
        head_dim_v=dim_v,
        dtype=_SPEC_DTYPES[dtype],
        causal=causal,
        window=window,
        softcap=softcap,
        alibi=alibi,
        sink=sink,
        dropout=dropout,
        varlen=varlen,
        split_kv=split_kv,
        paged=paged,
        backward=backward,
        deterministic=deterministic,
    )
    return _ATTENTIONS.setdefault(key, Attention(spec))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _attribute(key: _Key) -> str:
    """Where _TRACED has the Attention of a key. torch.compile calls this as it is, and does not trace it."""
    attention = _ATTENTIONS.get(key) or _derive(key)
    setattr(_TRACED, attention.spec.slug, attention)
    return attention.spec.slug


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """float32 tensors in autocast's type, where autocast is on; SpecError otherwise."""
    q = tensors[0]
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        if q.dtype == torch.float32 and dtype in _SPEC_DTYPES:
            return tuple(x.to(dtype) for x in tensors)
    raise SpecError(
        f"q has dtype {q.dtype}; q, k and v must be float16 or bfloat16: convert them, or use torch.autocast"
    )


def _padded(x: Tensor) -> Tensor:
    """x with zeros behind its head dim, up to a multiple of 8."""
    missing = -x.shape[-1] % HEAD_DIM_STEP
    return pad(x, (0, missing)) if missing else x
