"""What a traced kernel writes down: the stages of its arithmetic by name, and the parameters that say where they go.

A traced kernel is rendered from the templates of the kernel that it explains, with the points of
`templates/common/trace.cuh.j2` between their lines; `fagen.trace` runs it and compares. One block is traced: of scores
a rectangle of queries and keys, of what grows from step to step the state after each.
"""

from __future__ import annotations

from functools import cached_property

from fagen.arch.tiles import HopperTile
from fagen.params import Field, ParamStruct
from fagen.plan import KernelPlan

FORWARDS = ("fwd", "decode")  # of queries that walk over keys
KINDS = (*FORWARDS, "combine", "bwd", "bwd_dq")  # kernels that can be traced

_RUNNING = Field("trace_running", "float*", "(steps, 3, rows): first key of the step, reference, sum")
_BETWEEN = Field("trace_between", "float*", "(2, rows): lse and delta, as the forward and bwd_delta left them")
_PARTS = (
    Field("trace_o_part", "float*", "(splits, rows, Dv): o of a part of the keys"),
    Field("trace_lse_part", "float*", "(splits, rows)"),
)
_JOINED = (
    Field("trace_lse_part", "float*", "(splits,): as it was read"),
    Field("trace_weight", "float*", "(splits,): of the part"),
    Field("trace_o_part", "float*", "(splits, Dv): as it was read"),
    Field("trace_sum", "float*", "(1,): of the weights"),
    Field("trace_block", "int", "the number of the block"),
)
_PLACE = (
    Field("trace_batch", "int", "what is traced: a batch entry,"),
    Field("trace_head", "int", "a head, of k and v where a block has all query heads that share it,"),
    Field("trace_row", "int", "queries from this one on,"),
    Field("trace_rows", "int", "so many, of all heads together,"),
    Field("trace_head_rows", "int", "of one head,"),
    Field("trace_column", "int", "and keys from this one on,"),
    Field("trace_columns", "int", "so many"),
    Field("trace_steps", "int", "of the block"),
)


def of_scores(kernel: KernelPlan) -> tuple[str, ...]:
    """The stages that a score of a kernel goes through, in order."""
    if kernel.kind == "combine":
        return ()
    spec = kernel.spec
    mods = [mod.name for mod in spec.mods]
    absorbed = bool(spec.mods) and spec.mods[0].absorbs_scale
    dropout = ["dropout"] if spec.dropout else []
    forward = ("S", *([] if absorbed else ["scaled"]), *mods, "mask", "P", *dropout)
    if kernel.kind in FORWARDS:
        return forward
    gradients = ["dS", *(f"dS_{name}" for name in reversed(mods))]
    if kernel.transposed:
        # Derivatives of modifications go into P, and dS is past them at once.
        early = [f"P_{mod.name}" for mod in reversed(kernel.early_mods)]
        return (*forward, *early, "dP", *gradients[len(early) :])
    return (*forward, "dP", *gradients)


def of_steps(kernel: KernelPlan) -> tuple[str, ...]:
    """The accumulators that a kernel has after each step."""
    if kernel.kind in FORWARDS:
        return ("O",)
    if kernel.kind == "combine":
        return ()
    if kernel.kind == "bwd_dq":
        return ("dQ",)
    ordered = kernel.spec.deterministic and not kernel.transposed  # then bwd_dq has dQ
    return ("dK", "dV") if ordered else ("dK", "dV", "dQ")


def fields(kernel: KernelPlan) -> tuple[Field, ...]:
    """The parameters of a traced kernel beside its own."""
    if kernel.kind == "combine":
        return _JOINED
    shapes = {
        "O": "(steps, rows, Dv): sum of P V so far",
        "dK": "(steps, keys, D): sum of dS^T Q so far",
        "dV": "(steps, keys, Dv): sum of P^T dO so far",
        "dQ": "(steps, rows, D): sum of dS K so far"
        if kernel.kind == "bwd_dq"
        else "(steps, queries, D): dS K of the step",
    }
    return (
        Field("trace_scores", "float*", f"(stages, rows, columns): {', '.join(of_scores(kernel))}"),
        _RUNNING if kernel.kind in FORWARDS else _BETWEEN,
        *(Field(f"trace_{name.lower()}", "float*", shapes[name]) for name in of_steps(kernel)),
        *(_PARTS if kernel.spec.split_kv else ()),
        *_PLACE,
    )


class TracedPlan(KernelPlan):
    """The variant of a kernel that also writes down what it computes on the way."""

    @classmethod
    def of(cls, kernel: KernelPlan) -> TracedPlan:
        return cls(kernel.spec, kernel.kind, kernel.arch, kernel.tile)

    @property
    def slug(self) -> str:
        return f"{super().slug}_traced"

    @property
    def entry(self) -> str:
        return f"{super().entry}_traced"

    @property
    def primitives(self) -> tuple[str, ...]:
        # Hopper's P is in 16 bits when dropout is done with it.
        more = ("unpack",) if isinstance(self.tile, HopperTile) and self.spec.dropout else ()
        return super().primitives + more

    @property
    def trace_stages(self) -> tuple[str, ...]:
        """What a score goes through."""
        return of_scores(self)

    @cached_property
    def params(self) -> ParamStruct:
        return ParamStruct([*super().params.fields, *fields(self)])
