"""Score modifications: what happens to a score between the product and the mask.

A modification is one template fragment (`templates/mods/<name>.cuh.j2`), one boolean field of AttentionSpec of the same
name, and one row of MODS: its run-time parameters and its definition in eager PyTorch. The parameter struct, the
reference, the command-line flag and the slug follow.

The fragment has `forward`, which changes one score, or `tile`, which changes all of a warp's step. Beside `tile` it may
have `exponent`, which makes one score one in log2 units, and `exponent_holds`, whether that was right for all of them:
the Hopper forward then need not know the row maxima, as it has to where there is `tile` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fagen.errors import SpecError
from fagen.params import Field

if TYPE_CHECKING:
    import torch

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class CallContext:
    """What a modification may read of a call when it packs its parameters."""

    batch: int
    heads_q: int
    softmax_scale: float
    device: torch.device


@dataclass(frozen=True)
class ScoreContext:
    """Where the scores of one call stand, for the eager definitions. All tensors broadcast to (B, Hq, Sq, Sk)."""

    row: torch.Tensor  # (Sq, 1), query positions i + off, bottom-right aligned
    col: torch.Tensor  # (1, Sk), key positions j


@dataclass(frozen=True)
class Mod:
    """One score modification."""

    name: str  # field of AttentionSpec, template fragment, slug
    argument: str  # keyword of the call that carries its value
    fields: tuple[Field, ...]  # its part of the parameter struct
    # (value of the call, context) -> field values; raises SpecError for a value it cannot take. A tensor stands for its
    # address, and is kept alive until the launch.
    pack: Callable[[Any, CallContext], Mapping[str, Any]]
    eager: Callable[[torch.Tensor, Any, ScoreContext], torch.Tensor]  # (scores float64 (B, Hq, Sq, Sk), value, context)
    example: Callable[[CallContext], Any]  # a value for checks where none is given, chosen so that the effect shows
    primitives: tuple[str, ...] = ()  # files of templates/ptx and templates/emulate that the fragment calls besides
    differentiable: bool = True  # the fragment has a `backward`; without one a spec with backward is refused
    absorbs_scale: bool = False  # takes the raw product and applies softmax_scale itself; only the first of a spec can


def _pack_softcap(value: Any, call: CallContext) -> Mapping[str, Any]:
    cap = positive_float("softcap", value)
    # Below the border tanh(y) is a cubic, whose error border^5 / 60 times the cap is to be below 8e-5 in a score. It is
    # y - y^3 / 3 + 2 y^5 / 15 with the last term as a line in y^2 (Chebyshev). z = 2 at the border.
    border = min(3 / 16, (60 * 8e-5 / cap) ** 0.2)
    half = border / 2
    return {
        "softcap_inner": call.softmax_scale / cap / half,
        "softcap_log2": cap * LOG2E,
        "softcap_linear": (1 - border**4 / 60) * half,
        "softcap_cubic": (border**2 * 2 / 15 - 1 / 3) * half**3,
        "softcap_exponent": border * LOG2E,
    }


def _eager_softcap(scores: torch.Tensor, value: Any, context: ScoreContext) -> torch.Tensor:
    capped: torch.Tensor = value * (scores / value).tanh()
    return capped


def _pack_alibi(value: Any, call: CallContext) -> Mapping[str, Any]:
    shapes = ((call.heads_q,), (call.batch, call.heads_q))
    if not hasattr(value, "data_ptr"):
        raise SpecError(f"alibi_slopes must be a float32 tensor, got {type(value).__name__}")
    if tuple(value.shape) not in shapes:
        raise SpecError(f"alibi_slopes has shape {tuple(value.shape)}; expected {shapes[0]} or {shapes[1]}")
    if str(value.dtype) != "torch.float32":
        raise SpecError(f"alibi_slopes has dtype {value.dtype}; expected torch.float32")
    if value.device != call.device:
        raise SpecError(f"alibi_slopes is on {value.device}, q on {call.device}")
    return {
        "alibi_slopes": value,
        "alibi_batch_stride": value.stride(0) if value.dim() == 2 else 0,
        "alibi_head_stride": value.stride(-1),
    }


def _eager_alibi(scores: torch.Tensor, value: Any, context: ScoreContext) -> torch.Tensor:
    slopes: torch.Tensor = value.to(scores.dtype)
    slopes = slopes[:, :, None, None] if slopes.dim() == 2 else slopes[None, :, None, None]
    return scores - slopes * (context.row - context.col).abs().to(scores.dtype)


def _example_alibi(call: CallContext) -> torch.Tensor:
    """Slopes (Hq,) of the ALiBi paper for a power of two heads: a geometric sequence from 2^(-8/Hq) on."""
    import torch

    exponents = torch.arange(1, call.heads_q + 1, dtype=torch.float32, device="cpu") * (-8.0 / call.heads_q)
    return exponents.exp2().to(call.device)


def positive_float(name: str, value: Any) -> float:
    """`value` as a float; SpecError unless it is a finite positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name} must be a positive number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise SpecError(f"{name} must be a finite positive number, got {value!r}")
    return float(value)


MODS: tuple[Mod, ...] = (
    Mod(
        name="softcap",
        argument="softcap",
        fields=(
            Field("softcap_inner", "float", "a score to z: 2 / border * softmax_scale / softcap"),
            Field("softcap_log2", "float", "softcap * log2(e)"),
            Field("softcap_linear", "float", "tanh is softcap_linear * z + softcap_cubic * z^3 where |z| < 2"),
            Field("softcap_cubic", "float"),
            Field("softcap_exponent", "float", "exp(2 y) is exp2(softcap_exponent * z)"),
        ),
        pack=_pack_softcap,
        eager=_eager_softcap,
        example=lambda call: 2.0,
        absorbs_scale=True,
    ),
    Mod(
        name="alibi",
        argument="alibi_slopes",
        fields=(
            Field("alibi_slopes", "const float*"),
            Field("alibi_batch_stride", "i64"),
            Field("alibi_head_stride", "i64"),
        ),
        pack=_pack_alibi,
        eager=_eager_alibi,
        example=_example_alibi,
    ),
)
