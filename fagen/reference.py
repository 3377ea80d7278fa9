"""The float64 oracle: SEMANTICS.md in PyTorch.

Everything is computed in float64 on the device of the inputs, in the order of operations that the definition gives, and
is differentiable. The score modifications are those of ``fagen.mods``, applied in its order, so that a new modification
needs no change here. Memory is bounded by working through blocks of query rows, each of which autograd computes again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fagen.errors import SpecError
from fagen.mods import ScoreContext
from fagen.registry import known

__all__ = ["Observe", "attention", "dropout_mask", "gradients", "keep_threshold", "keys_seen", "philox", "seen"]

# Scores held at once: 32 MB a float64 tensor, and about six of them are alive at the widest point.
BLOCK_SCORES = 1 << 22

# Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): multipliers and key increments.
PHILOX_M0, PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
PHILOX_W0, PHILOX_W1 = 0x9E3779B9, 0xBB67AE85
PHILOX_ROUNDS = 10
U32 = 0xFFFFFFFF

# Told of every intermediate: its name, the number of its first batch entry, its query rows, its keys, and its values,
# (B, Hq, rows, keys). Where gradients are computed the values are part of the graph, so that hooks see theirs.
Observe = Callable[[str, int, range, range, Tensor], None]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    dropout_p: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    first_batch: int = 0,
    sink: Tensor | None = None,
    return_lse: bool = True,
    observe: Observe | None = None,
    **values: Any,
) -> Any:
    """Attention in float64.

    ``q`` (B, Sq, Hq, D), ``k`` (B, Sk, Hk, D), ``v`` (B, Sk, Hk, Dv), any dtype and strides, ``Hq % Hk == 0``. The
    masks are aligned to the bottom right: row ``i`` stands at key ``i + Sk - Sq``. ``window`` is (left, right),
    inclusive, -1 for no bound; with ``causal`` the two intersect. ``values`` are the call's values of the score
    modifications by their parameter names (``softcap=50.0``, ``alibi_slopes=...``); None means off. ``sink`` (Hq,) is
    one more score of each row, whose key has no value. ``first_batch`` is the number of the first batch entry, of which
    the dropout mask is a function. ``observe`` is told of ``S``, the product, ``scaled``, each modification by its
    name, ``mask``, ``P`` (normalised), and with dropout of ``keep``, what P is multiplied by, and of ``dropout``, what
    that gives.

    Returns ``o`` (B, Sq, Hq, Dv) and ``lse`` (B, Hq, Sq), natural log of the undropped softmax, both float64; only
    ``o`` with ``return_lse=False``. A row that sees no key gives o = 0 and lse = -inf, or its sink, and touches no
    other gradient.

    Raises SpecError for shapes that do not belong together, ``dropout_p`` outside [0, 1), dropout without a seed, and
    values of unknown modifications.
    """
    _check_shapes(q, k, v)
    unknown = set(values) - {mod.argument for mod in known()}
    if unknown:
        raise SpecError(f"no score modification takes {', '.join(sorted(unknown))}")
    threshold = keep_threshold(dropout_p)
    if dropout_p > 0 and seed is None:
        raise SpecError("dropout needs a seed")

    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_k = v.shape[1:3]
    group = heads // heads_k if heads_k else 1
    off = seqlen_k - seqlen_q
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    head = torch.arange(batch * heads, device=q.device).view(batch, heads, 1, 1) + first_batch * heads
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))

    def block(rows: range) -> tuple[Tensor, Tensor]:
        """o (B, Hq, rows, Dv) and lse (B, Hq, rows) of these query rows; keys are never split, so each row is whole."""
        # A key that none of the rows sees owns no part of the result, whatever lies there: 0 * NaN must not arise.
        keys = keys_seen(rows, off, seqlen_k, causal, window)
        row = torch.arange(rows.start + off, rows.stop + off, device=q.device)[:, None]
        col = torch.arange(keys.start, keys.stop, device=q.device)[None, :]
        span = slice(keys.start, keys.stop)

        def note(name: str, values: Tensor) -> Tensor:
            if observe is not None:
                observe(name, first_batch, rows, keys, values)
            return values

        s = note("S", _per_group(q[:, :, rows.start : rows.stop], k[:, :, span].transpose(2, 3), group))
        s = note("scaled", scale * s)
        context = ScoreContext(row=row, col=col, rows=slice(rows.start, rows.stop), keys=span)
        for mod in known():
            value = values.get(mod.argument)
            if value is not None:
                s = note(mod.name, mod.eager(s, value, context))
        s = note("mask", s.masked_fill(~_visible(row, col, causal, window), -math.inf))

        # The maximum of a row that sees nothing is -inf; 0 in its place keeps exp(s - m) = 0 and its gradient 0.
        m = s.detach().amax(dim=3, keepdim=True) if len(keys) else s.new_full((*s.shape[:3], 1), -math.inf)
        last = None if sink is None else sink.double().view(1, heads, 1, 1)
        if last is not None:
            m = torch.maximum(m, last.detach())
        m = m.masked_fill(m == -math.inf, 0.0)
        p = torch.exp(s - m)
        total = p.sum(dim=3, keepdim=True)
        if last is not None:
            total = total + torch.exp(last - m)
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        lse = (m + torch.log(total)).masked_fill(empty, -math.inf).squeeze(3)
        p = note("P", p / total)
        if dropout_p > 0:
            assert seed is not None
            keep = _keep(seed, offset, head, rows, seqlen_k, threshold)[..., span].double() * (65536 / threshold)
            p = note("dropout", p * note("keep", keep))
        return _per_group(p, v[:, :, span], group), lse

    length = max(1, BLOCK_SCORES // max(1, batch * heads * seqlen_k))
    # At least one block, so that empty inputs get their shapes the same way.
    starts = range(0, max(1, seqlen_q), length)
    spans = [range(start, min(start + length, seqlen_q)) for start in starts]
    leaves = (q, k, v, *(value for value in (sink, *values.values()) if isinstance(value, Tensor)))
    if len(spans) > 1 and torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        blocks = [checkpoint(block, span, use_reentrant=False, preserve_rng_state=False) for span in spans]
    else:
        blocks = [block(span) for span in spans]
    o = torch.cat([o for o, _ in blocks], 2).transpose(1, 2)
    lse = torch.cat([lse for _, lse in blocks], 2)
    return (o, lse) if return_lse else o


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None,
    **call: Any,
) -> tuple[Tensor, Tensor]:
    """``attention`` of packed sequences, one at a time.

    ``q`` (Tq, Hq, D), ``k`` (Tk, Hk, D), ``v`` (Tk, Hk, Dv). Sequence b has the rows ``cu_seqlens_q[b]`` to
    ``cu_seqlens_q[b + 1]`` of q, and of k and v likewise, of which the first ``seqused_k[b]`` count if that is given.
    Returns o (Tq, Hq, Dv) and lse (Hq, Tq), 0 and -inf for rows of no sequence.
    """
    o = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64, device=q.device)
    begins_q, begins_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(begins_q) - 1):
        rows = slice(begins_q[b], begins_q[b + 1])
        used = begins_k[b + 1] - begins_k[b] if seqused_k is None else int(seqused_k[b])
        keys = slice(begins_k[b], begins_k[b] + used)
        given = [mod for mod in known() if call.get(mod.argument) is not None]
        values = {mod.argument: mod.entry(call[mod.argument], b) for mod in given}
        o_b, lse_b = attention(q[None, rows], k[None, keys], v[None, keys], first_batch=b, **call | values)
        o[rows], lse[:, rows] = o_b[0], lse_b[0]
    return o, lse


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    d_lse: Tensor | None = None,
    *,
    also: Sequence[str] = (),
    **call: Any,
) -> tuple[Tensor, ...]:
    """dq, dk and dv in float64, shaped as q, k and v, then the gradients of the values that ``also`` names: what
    autograd makes of ``d_o`` (B, Sq, Hq, Dv) and ``d_lse`` (B, Hq, Sq), those of ``attention(q, k, v, **call)``, or of
    ``packed`` where ``call`` has cu_seqlens_q. None stands for zeros."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *(call[name] for name in also))]
    call |= dict(zip(also, leaves[3:], strict=True))
    with torch.enable_grad():
        o, lse = (packed if "cu_seqlens_q" in call else attention)(*leaves[:3], **call)
    outputs, upstream = [o], [d_o.double()]
    if d_lse is not None:
        outputs, upstream = [o, lse], [d_o.double(), d_lse.double()]
    return torch.autograd.grad(outputs, leaves, upstream)


def seen(
    seqlen_q: int, seqlen_k: int, *, causal: bool = False, window: tuple[int, int] = (-1, -1)
) -> tuple[Tensor, Tensor]:
    """Which queries see a key, bool (Sq,), and which keys a query sees, bool (Sk,). The gradients of others are 0."""
    left, right = (seqlen_q + seqlen_k if side < 0 else side for side in window)
    if causal:
        right = 0
    off = seqlen_k - seqlen_q
    # Query positions run from off to Sk - 1, key positions from 0 to Sk - 1.
    row, key = torch.arange(off, seqlen_k), torch.arange(seqlen_k)
    rows = (row + right >= 0) & (row - left < seqlen_k) & (seqlen_k > 0)
    keys = (key + left >= off) & (key - right < seqlen_k) & (seqlen_q > 0)
    return rows, keys


def keep_threshold(p: float) -> int:
    """The number of 16-bit values, of 65536, for which a score is kept: at least 1, 65536 for p = 0.

    Kept values are scaled by ``65536 / keep_threshold(p)``, the exact inverse of the probability that this quantises.
    Raises SpecError for p outside [0, 1).
    """
    if not 0 <= p < 1:
        raise SpecError(f"dropout_p must lie in [0, 1), got {p}")
    return max(1, round((1 - p) * 65536))


def dropout_mask(
    seed: int,
    offset: int,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    p: float,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which scores dropout keeps: bool (B, Hq, Sq, Sk), a pure function of (seed, offset, b, h, i, j).

    One Philox4x32-10 draw serves the eight scores that a thread holds of a 16x16 block in an mma fragment: rows r and
    r + 8, columns 2c, 2c + 1, 2c + 8 and 2c + 9. Counter: (i >> 4) * 8 + (i & 7); (j >> 4) * 4 + ((j & 7) >> 1);
    b * Hq + h; the offset's low 32 bits. Key: the seed's low 32 bits; its high 32 bits xor the offset's high 32 bits.
    The outputs are read as eight 16-bit values, low half first; a score takes the value of index
    ((i >> 3) & 1) * 4 + ((j >> 3) & 1) * 2 + (j & 1), and is kept if that is below ``keep_threshold(p)``.
    """
    head = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    return _keep(seed, offset, head, range(seqlen_q), seqlen_k, keep_threshold(p))


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four int64 tensors that hold 32-bit words and broadcast, and a key, to four such tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        # The products wrap modulo 2^64 in int64, which leaves both 32-bit halves as they should be.
        low, high = c0 * PHILOX_M0, c2 * PHILOX_M1
        c0, c1, c2, c3 = (high >> 32 & U32) ^ c1 ^ k0, high & U32, (low >> 32 & U32) ^ c3 ^ k1, low & U32
        k0, k1 = (k0 + PHILOX_W0) & U32, (k1 + PHILOX_W1) & U32
    return c0, c1, c2, c3


def _keep(seed: int, offset: int, head: Tensor, rows: range, seqlen_k: int, threshold: int) -> Tensor:
    """The dropout mask (b, h, rows, Sk) for ``head`` (b, h, 1, 1), the numbers b * Hq + h."""
    device = head.device
    first, last = rows.start >> 4, (rows.stop + 15) >> 4
    blocks_q, blocks_k = last - first, (seqlen_k + 15) >> 4
    out = philox(
        (
            torch.arange(first * 8, last * 8, device=device).view(1, 1, -1, 1) & U32,
            torch.arange(blocks_k * 4, device=device).view(1, 1, 1, -1) & U32,
            head & U32,
            torch.tensor(offset & U32, device=device),
        ),
        (seed & U32, (seed >> 32 & U32) ^ (offset >> 32 & U32)),
    )
    halves = [word >> shift & 0xFFFF for word in out for shift in (0, 16)]
    batch, heads = head.shape[:2]
    bits = torch.stack([half.expand(batch, heads, blocks_q * 8, blocks_k * 4) < threshold for half in halves])
    # (i >> 3 & 1, j >> 3 & 1, j & 1, b, h, i >> 4, i & 7, j >> 4, (j & 7) >> 1), to the order of i and j
    bits = bits.view(2, 2, 2, batch, heads, blocks_q, 8, blocks_k, 4).permute(3, 4, 5, 0, 6, 7, 1, 8, 2)
    mask = bits.reshape(batch, heads, blocks_q * 16, blocks_k * 16)
    start = rows.start - first * 16
    return mask[:, :, start : start + len(rows), :seqlen_k]


def keys_seen(rows: range, off: int, seqlen_k: int, causal: bool, window: tuple[int, int]) -> range:
    """The keys that at least one of the rows sees: one range, since both bounds move by one key a row."""
    left, right = window
    start, stop = 0, seqlen_k
    if left >= 0:
        start = max(start, rows.start + off - left)
    if right >= 0:
        stop = min(stop, rows.stop + off + right)
    if causal:
        stop = min(stop, rows.stop + off)
    start = min(start, seqlen_k)
    return range(start, max(start, stop))


def _visible(row: Tensor, col: Tensor, causal: bool, window: tuple[int, int]) -> Tensor:
    """Which keys the rows see, (rows, keys), by their positions."""
    left, right = window
    visible = torch.ones_like(row + col, dtype=torch.bool)
    if causal:
        visible &= col <= row
    if left >= 0:
        visible &= col >= row - left
    if right >= 0:
        visible &= col <= row + right
    return visible


def _per_group(a: Tensor, b: Tensor, group: int) -> Tensor:
    """(b, Hk * group, m, n) @ (b, Hk, n, p), the matrix of a KV head shared by its group of query heads."""
    batch, heads, rows, inner = a.shape
    product = a.reshape(batch, heads // group, group * rows, inner) @ b
    return product.view(batch, heads, rows, b.shape[3])


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise SpecError(f"{name} must have the shape (B, S, H, D), got {tuple(x.shape)}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise SpecError(f"shapes of q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not belong together")
    if (k.shape[2] and q.shape[2] % k.shape[2]) or (not k.shape[2] and q.shape[2]):
        raise SpecError(f"query heads ({q.shape[2]}) must be a multiple of key heads ({k.shape[2]})")
