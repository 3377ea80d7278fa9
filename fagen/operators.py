"""`torch.ops.fagen.forward` and `torch.ops.fagen.backward`: what torch.compile, opcheck and dispatch modes see.

A spec travels as its JSON, the target as its name ("" is the device's own). The values of score modifications come in
the order of the spec, tensors in `mod_tensors` and numbers in `mod_numbers`; `mod_is_tensor` says which are which.
`packed` is empty, or has what `fagen.call.Packed` has. Of the backward, `d_mods` has the gradients of `mod_tensors`,
and `needed` says which of q, k, v and these are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from fagen.call import Packed, Values, check_tensors, lse_shape, stats_shape
from fagen.errors import SpecError
from fagen.prepared import Saved
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    from fagen.ops import Attention

SECOND_DERIVATIVE = (
    "fagen computes no second derivatives: the gradients of attention cannot be differentiated again; "
    "where they must be, use scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
)

_VALUES = (
    "str spec, str arch, float? softmax_scale, SymInt[]? window, float? dropout_p, Tensor[] mod_tensors, "
    "float[] mod_numbers, bool[] mod_is_tensor, Tensor?[] packed, SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    "SymInt? num_splits, Tensor? philox_state"
)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

torch.library.define(
    "fagen::forward", f"(Tensor q, Tensor k, Tensor v, {_VALUES}) -> (Tensor o, Tensor lse, Tensor stats)", tags=_TAGS
)
torch.library.define(
    "fagen::backward",
    "(Tensor? d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor stats, Tensor? lse, "
    f"{_VALUES}, bool[] needed) -> (Tensor d_q, Tensor d_k, Tensor d_v, Tensor[] d_mods)",
    tags=_TAGS,
)


@lru_cache(maxsize=1024)
def _attention(spec: str, arch: str) -> Attention:
    from fagen.ops import Attention

    return Attention(AttentionSpec.model_validate_json(spec), arch=arch or None)


def _values(
    softmax_scale: float | None,
    window: Sequence[int] | None,
    dropout_p: float | None,
    mod_tensors: Sequence[torch.Tensor],
    mod_numbers: Sequence[float],
    mod_is_tensor: Sequence[bool],
    packed: Sequence[torch.Tensor | None],
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    num_splits: int | None,
) -> Values:
    tensors, numbers = iter(mod_tensors), iter(mod_numbers)
    mods = tuple(next(tensors) if is_tensor else next(numbers) for is_tensor in mod_is_tensor)
    sequences = Packed(tuple(packed), max_seqlen_q, max_seqlen_k) if packed else None
    return Values(softmax_scale, None if window is None else tuple(window), dropout_p, mods, sequences, num_splits)  # type: ignore[arg-type]


@torch.library.impl("fagen::forward", ("cpu", "cuda"))
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: str, arch: str, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *given, state = rest
    o, lse, stats = _attention(spec, arch)._forward(q, k, v, _values(*given), state)
    return o, lse, lse.new_empty(0) if stats is None else stats


@torch.library.register_fake("fagen::forward")  # type: ignore[untyped-decorator]
def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: str, arch: str, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parsed = _attention(spec, arch).spec
    *given, _ = rest
    sizes = check_tensors(parsed, q, k, v, _values(*given).packed)
    o = q.new_empty((*q.shape[:-1], parsed.dim_v))
    lse = q.new_empty(lse_shape(parsed, q), dtype=torch.float32)
    return o, lse, lse.new_empty(stats_shape(parsed, sizes, q) if parsed.backward else (0,))


@torch.library.impl("fagen::backward", ("cpu", "cuda"))
def _backward(
    d_o: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    stats: torch.Tensor,
    lse: torch.Tensor | None,
    spec: str,
    arch: str,
    *rest: Any,
) -> tuple[torch.Tensor | list[torch.Tensor], ...]:
    *given, state, needed = rest
    saved, values = Saved(q, k, v, o, stats, lse), _values(*given)
    of_all = [*needed, *[False] * (3 + len(values.tensors()) - len(needed))]  # packed sequences have no gradient
    gradients = _attention(spec, arch)._gradients(of_all, d_o, d_lse, saved, values, state)
    dq, dk, dv, *of_mods = [q.new_empty(0) if gradient is None else gradient for gradient in gradients[: len(needed)]]
    return dq, dk, dv, of_mods


@torch.library.register_fake("fagen::backward")  # type: ignore[untyped-decorator]
def _fake_backward(
    d_o: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    stats: torch.Tensor,
    lse: torch.Tensor | None,
    spec: str,
    arch: str,
    softmax_scale: float | None,
    window: Sequence[int] | None,
    dropout_p: float | None,
    mod_tensors: Sequence[torch.Tensor],
    *rest: Any,
) -> tuple[torch.Tensor | list[torch.Tensor], ...]:
    inputs = (q, k, v, *mod_tensors)
    dq, dk, dv, *of_mods = [
        x.new_empty(x.shape) if need else q.new_empty(0) for x, need in zip(inputs, rest[-1], strict=True)
    ]
    return dq, dk, dv, of_mods


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, spec, arch, softmax_scale, window, dropout_p, mod_tensors, *of_mods, packed, _, _, _, state = inputs
    o, lse, stats = output
    parsed = _attention(spec, arch).spec
    if not parsed.backward:
        raise SpecError(
            "an input requires a gradient, and the kernel computes none: "
            "AttentionSpec(..., backward=True), or call under torch.no_grad()"
        )
    ctx.n_packed = len(packed)
    ctx.lengths = inputs[-4:-1]
    ctx.save_for_backward(q, k, v, o, stats, lse if parsed.sink else None, state, *packed, *mod_tensors)
    ctx.scalars = (spec, arch, softmax_scale, window, dropout_p)
    ctx.of_mods = of_mods
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats)


def _gradients(
    ctx: Any, d_o: torch.Tensor | None, d_lse: torch.Tensor | None, d_stats: torch.Tensor | None
) -> tuple[Any, ...]:
    q, k, v, o, stats, lse, state, *tensors = ctx.saved_tensors
    packed, mod_tensors = tensors[: ctx.n_packed], tensors[ctx.n_packed :]
    needed = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[8]]
    gradients: list[Any] = [None] * len(needed)
    if d_o is not None or d_lse is not None:
        *made, of_mods = torch.ops.fagen.backward(
            *(d_o, d_lse, q, k, v, o, stats, lse, *ctx.scalars, mod_tensors, *ctx.of_mods),
            *(packed, *ctx.lengths, state, needed),
        )
        gradients = [gradient if need else None for gradient, need in zip((*made, *of_mods), needed, strict=True)]
    lists = (gradients[3:], *map(_none_for, ctx.of_mods), _none_for(packed))
    return (*gradients[:3], *(None,) * 5, *lists, *(None,) * 4)


def _none_for(argument: Sequence[Any]) -> list[None] | None:
    """No gradient, as PyTorch wants it: it takes lists of tensors apart, empty lists too, and leaves others whole."""
    return [None] * len(argument) if all(isinstance(entry, torch.Tensor) for entry in argument) else None


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise SpecError(SECOND_DERIVATIVE)


torch.library.register_autograd("fagen::forward", _gradients, setup_context=_save_for_backward)
torch.library.register_autograd("fagen::backward", _refuse)
