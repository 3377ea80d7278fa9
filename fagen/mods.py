"""Score modifications: what happens to a score between the product and the mask.

A modification is one template fragment (`templates/mods/<name>.cuh.j2`), one boolean field of AttentionSpec of the same
name, and one row of MODS: its run-time parameters and its definition in eager PyTorch. The parameter struct, the
reference, the command-line flag and the slug follow. One from outside (`fagen.registry`) needs no field.

The fragment has `forward`, which changes one score, or `tile`, which changes all of a warp's step. Beside `tile` it may
have `exponent`, which makes one score one in log2 units, and `exponent_holds`, whether that was right for all of them:
the Hopper forward then need not know the row maxima, as it has to where there is `tile` alone. Its `backward` turns the
gradient of the new score into that of the old; before, its `value_gradient` adds to that of the value (`Mod.gradient`).
Both are for one score, wherever it lies. For Hopper's backward, whose scores lie keys by queries, a fragment may have
`tile_transposed` besides, and `value_gradient_setup`, what a step declares for `value_gradient`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    seqlen_q: int
    seqlen_k: int
    softmax_scale: float
    device: torch.device
    dtype: str = "bf16"  # of q, as the spec has it
    deterministic: bool = False  # the same bits of gradients are wanted from run to run


@dataclass(frozen=True)
class ScoreContext:
    """Where the scores of one call stand, for the eager definitions: they are those of some rows and keys of all.

    All tensors broadcast to (B, Hq, rows, keys)."""

    row: torch.Tensor  # (rows, 1), query positions i + off, bottom-right aligned
    col: torch.Tensor  # (1, keys), key positions j
    rows: slice  # of the queries, by their numbers i
    keys: slice  # of the keys


@dataclass(frozen=True)
class Gradient:
    """The gradient of a modification's value, a tensor: a float32 sum to which `value_gradient` of the fragment adds
    what a score contributes, in the main backward kernel and in no other."""

    fields: tuple[Field, ...]  # of that kernel alone: the address of the sum, null where it is not wanted, and others
    # (value, context) -> shape of the sum, which holds zeros before the launch, and the values of the other fields.
    pack: Callable[[torch.Tensor, CallContext], tuple[tuple[int, ...], Mapping[str, Any]]]
    # (sum, value) -> the gradient, in the shape and dtype of the value
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    # With context.deterministic, no two scores add to the same word. Otherwise a gradient is refused there.
    ordered: bool = True

    @property
    def sum_name(self) -> str:
        """The field with the address of the sum."""
        (name,) = (field.name for field in self.fields if field.is_tensor)
        return name


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
    entry: Callable[[Any, int], Any] = lambda value, b: value  # (value, b) -> that of batch entry b, for a batch of one
    primitives: tuple[str, ...] = ()  # files of templates/ptx and templates/emulate that the fragment calls besides
    differentiable: bool = True  # the fragment has a `backward`; without one a spec with backward is refused
    absorbs_scale: bool = False  # takes the raw product and applies softmax_scale itself; only the first of a spec can
    gradient: Gradient | None = None  # without one a value that requires a gradient is refused
    of_rows: bool = False  # has a gradient that follows from lse and delta of the rows, without a kernel
    unserved_with: Mapping[str, str] = field(default_factory=dict)  # features that exclude it, and why
    order: int = 30  # when it applies, before those of a higher one; 0, as of a cap, before anything is added
    reads_position: bool = False  # the fragment reads `offset`: query i stands at key position i + offset
    description: str = ""  # for --help, of a modification from outside

    def no_gradient(self, deterministic: bool) -> str | None:
        """Why its value has no gradient, behind "which"; None where it has one."""
        if self.gradient is None:
            return None if self.of_rows else "no kernel computes"
        if deterministic and not self.gradient.ordered:
            return "is added up in no fixed order, and the spec has deterministic=True"
        return None

    @property
    def all_fields(self) -> tuple[Field, ...]:
        """Its parameters in any kernel."""
        return self.fields + (self.gradient.fields if self.gradient else ())


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


def _entry_alibi(value: Any, b: int) -> Any:
    return value[b : b + 1] if value.dim() == 2 else value


def _example_alibi(call: CallContext) -> torch.Tensor:
    """Slopes (Hq,) of the ALiBi paper for a power of two heads: a geometric sequence from 2^(-8/Hq) on."""
    import torch

    exponents = torch.arange(1, call.heads_q + 1, dtype=torch.float32, device="cpu") * (-8.0 / call.heads_q)
    return exponents.exp2().to(call.device)


_BIAS_BYTES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2, "torch.bool": 1}
_BIAS_DIMS = ("batch", "head", "row", "col")


def _pack_bias(value: Any, call: CallContext) -> Mapping[str, Any]:
    of_q = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[call.dtype]
    full = (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k)
    if not hasattr(value, "data_ptr"):
        raise SpecError(f"bias must be a tensor, got {type(value).__name__}")
    if str(value.dtype) not in ("torch.float32", of_q, "torch.bool"):
        raise SpecError(f"bias has dtype {value.dtype}; expected torch.float32, {of_q} or torch.bool")
    if value.device != call.device:
        raise SpecError(f"bias is on {value.device}, q on {call.device}")
    shape = _as_scores(value)
    if value.dim() > 4 or any(size not in (1, whole) for size, whole in zip(shape, full, strict=True)):
        raise SpecError(
            f"bias has shape {tuple(value.shape)}, which does not broadcast to (batch, heads, queries, keys) = {full}"
        )
    size = _BIAS_BYTES[str(value.dtype)]
    strides = (0,) * (4 - value.dim()) + tuple(value.stride())
    by_name = {
        f"bias_{dim}_stride": 0 if shape[index] == 1 else strides[index] * size for index, dim in enumerate(_BIAS_DIMS)
    }
    return {"bias": value, "bias_bytes": size, **by_name}


def _as_scores(value: torch.Tensor) -> tuple[int, ...]:
    """The shape of a tensor that broadcasts to (B, Hq, Sq, Sk), in four dimensions."""
    return (1,) * (4 - value.dim()) + tuple(value.shape)


def _pack_bias_gradient(value: torch.Tensor, call: CallContext) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    shape = _as_scores(value)
    if call.deterministic:  # each score has a word of its own, and PyTorch adds them up in a fixed order
        shape = (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k)
    strides, step = [0] * 4, 1
    for index in reversed(range(4)):
        if shape[index] > 1:
            strides[index] = step
        step *= shape[index]
    return shape, {f"d_bias_{dim}_stride": stride for dim, stride in zip(_BIAS_DIMS, strides, strict=True)}


def _finish_bias_gradient(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return total.sum_to_size(value.shape).to(value.dtype)


def _eager_bias(scores: torch.Tensor, value: Any, context: ScoreContext) -> torch.Tensor:
    bias: torch.Tensor = value
    bias = bias[(None,) * (4 - bias.dim())]
    bias = bias if bias.shape[2] == 1 else bias[:, :, context.rows]
    bias = bias if bias.shape[3] == 1 else bias[..., context.keys]
    if str(bias.dtype) == "torch.bool":
        return scores.masked_fill(~bias, -math.inf)
    return scores + bias.to(scores.dtype)


def _entry_bias(value: Any, b: int) -> Any:
    return value[b : b + 1] if value.dim() == 4 and value.shape[0] > 1 else value


def _example_bias(call: CallContext) -> torch.Tensor:
    """Unit-normal float32 (B, Hq, Sq, Sk)."""
    import torch

    shape = (call.batch, call.heads_q, call.seqlen_q, call.seqlen_k)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(call.device)


def positive_float(name: str, value: Any) -> float:
    """`value` as a float; SpecError unless it is a finite positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{name} must be a positive number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise SpecError(f"{name} must be a finite positive number, got {value!r}")
    return float(value)


def _pack_sink(value: Any, call: CallContext) -> Mapping[str, Any]:
    if not hasattr(value, "data_ptr"):
        raise SpecError(f"sink must be a tensor, got {type(value).__name__}")
    if tuple(value.shape) != (call.heads_q,) or not str(value.dtype).startswith("torch.float"):
        raise SpecError(
            f"sink is {value.dtype} {tuple(value.shape)}; expected a number for each of {call.heads_q} heads"
        )
    if value.device != call.device:
        raise SpecError(f"sink is on {value.device}, q on {call.device}")
    return {"sink": value, "sink_stride": value.stride(0)}


def _example_sink(call: CallContext) -> torch.Tensor:
    """(Hq,), about as large as the largest scores."""
    import torch

    return torch.linspace(1.0, 4.0, call.heads_q, device=call.device)


# Not a modification of scores, but a value of the call like theirs: one more score of each row, whose key has no value.
SINK = Mod(
    name="sink",
    argument="sink",
    fields=(Field("sink", "const float*", "(Hq,)"), Field("sink_stride", "i64")),
    pack=_pack_sink,
    eager=lambda scores, value, context: scores,
    example=_example_sink,
    of_rows=True,
)

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
        order=0,
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
        entry=_entry_alibi,
        order=10,
        reads_position=True,
    ),
    Mod(
        name="bias",
        argument="bias",
        fields=(
            Field("bias", "const void*", "broadcasts to (B, Hq, Sq, Sk), strides in bytes below"),
            *(Field(f"bias_{dim}_stride", "i64") for dim in _BIAS_DIMS),
            Field("bias_bytes", "int", "of an element: 4 float32, 2 as q, 1 a mask"),
        ),
        pack=_pack_bias,
        eager=_eager_bias,
        example=_example_bias,
        entry=_entry_bias,
        primitives=("global_narrow", "unpack"),
        gradient=Gradient(
            fields=(
                Field("d_bias", "float*", "zero before; null where it is not wanted"),
                *(Field(f"d_bias_{dim}_stride", "i64") for dim in _BIAS_DIMS),
            ),
            pack=_pack_bias_gradient,
            finish=_finish_bias_gradient,
        ),
        order=20,
        unserved_with={"varlen": "a tensor (batch, heads, queries, keys) knows of no packed sequences"},
    ),
)
