"""Is a kernel right? One call of it beside the float64 reference, judged by the budgets of SEMANTICS.md.

`Case` names one call (a spec, shapes, values, memory layout) and makes its inputs; tests/cases.py is a table of them.
`compare_o`, `compare_lse` and `compare_gradients` judge results, `check` does the whole: build, run, compare, time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fagen import reference
from fagen.call import DTYPES
from fagen.errors import LaunchError, SpecError
from fagen.mods import CallContext
from fagen.reference import Observe
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    from fagen.ops import Attention
    from fagen.plan import KernelPlan

Layout = Literal["contiguous", "transposed", "sliced", "expanded"]
FlashErrors = dict[str, float]  # of PyTorch's flash kernel, by the name of the gradient; empty where it cannot say

# SEMANTICS.md, Accuracy: ||x - ref|| / ||ref|| of o and of gradients on unit-normal inputs, and what lse may be off by.
OUTPUT_BUDGET = {"bf16": 2.5e-3, "fp16": 4e-4}
GRADIENT_BUDGET = {"bf16": 1e-2, "fp16": 1.5e-3}
LSE_ABSOLUTE, LSE_RELATIVE = 1e-4, 1e-6
FLASH_FACTOR = 1.2

# One element may be off by this many budgets of its own size plus its row's root mean square. Rounding errors of P and
# o are normal with less than half a budget of that, so a correct kernel stays below; a lost or doubled key does not.
ELEMENT_FACTOR = 10.0

# The same for gradients, whose budget is wider; and beside its own row, an element may be off by two budgets of the
# largest root mean square of a row: where one key has nearly all the weight, dS = P (dP - delta) is a small difference,
# with the rounding errors of what it is a difference of.
GRADIENT_ELEMENT_FACTOR = 2.0
CANCELLATION_FACTOR = 2.0

# Standard deviations of the error that delta has from the rounding of o, which dS of a key with all the weight has too.
DELTA_FACTOR = 4.0

# Root mean square below which a gradient of unit-normal inputs is taken as this large: with one key a row, dP and delta
# are equal, and what is left of them in float32 is no error to speak of.
VANISHING = 1e-3

# What may underflow besides: P, rounded to 2^-25 in fp16 and flushed below 2^-126 in bf16, over a few keys and rescaled
# after dropout. It shows where dropout keeps only keys of hardly any weight.
UNDERFLOW = {torch.float16: 1e-6, torch.bfloat16: 1e-30}

FIRST_VALUES = 4
PAGE = 16  # keys of a page


@dataclass(frozen=True)
class Inputs:
    """Tensors and keyword arguments of one call."""

    q: Tensor  # (B, Sq, Hq, D), with spec.varlen (Tq, Hq, D)
    k: Tensor  # (B, Sk, Hk, D), (Tk, Hk, D)
    v: Tensor  # (B, Sk, Hk, Dv), (Tk, Hk, Dv)
    call: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of one kernel: a row of the table that tests, `fagen check` and `fagen bench` share.

    `window`, `dropout_p` and `values` (by the arguments of the score modifications: a number, or a function of the case
    and a generator that makes one) may be left out for features that the spec has: then the example of the modification
    stands in. `num_splits` and `ragged` are for spec.split_kv. `large` marks a case that takes too long emulated.
    """

    spec: AttentionSpec
    batch: int = 1
    heads: int = 2
    heads_k: int = 1
    seqlen_q: int = 64
    seqlen_k: int = 64
    softmax_scale: float | None = None
    window: tuple[int, int] | None = None
    dropout_p: float | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout = "contiguous"
    lse_gradient: bool = False  # the loss depends on lse too
    num_splits: int | None = None
    ragged: bool = False  # each batch entry has its own number of keys, and NaN behind them
    large: bool = False
    seed: int = 0

    @property
    def id(self) -> str:
        """Short unique name, `hdim64_bf16_causal-b1h2k1-q64k64`."""
        parts = [self.spec.slug, f"b{self.batch}h{self.heads}k{self.heads_k}", f"q{self.seqlen_q}k{self.seqlen_k}"]
        if self.softmax_scale is not None:
            parts.append(f"scale{self.softmax_scale:g}")
        if self.window is not None:
            parts.append(f"w{self.window[0]},{self.window[1]}")
        if self.dropout_p is not None:
            parts.append(f"p{self.dropout_p:g}")
        parts += [f"{name}{value:g}" if isinstance(value, int | float) else name for name, value in self.values.items()]
        if self.layout != "contiguous":
            parts.append(self.layout)
        if self.lse_gradient:
            parts.append("dlse")
        if self.num_splits is not None:
            parts.append(f"splits{self.num_splits}")
        if self.ragged:
            parts.append("ragged")
        if self.seed:
            parts.append(f"seed{self.seed}")
        return "-".join(parts)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """With spec.varlen, (queries, keys) of each of the `batch` sequences: the first has the most queries, seqlen_q,
        the last the most keys, seqlen_k."""
        n = self.batch
        return [(self.seqlen_q * (n - b) // n, self.seqlen_k * (b + 1) // n) for b in range(n)]

    @property
    def used(self) -> list[int]:
        """With spec.split_kv, keys of each batch entry: seqlen_k, or where `ragged` from none up to that; of a single
        entry two thirds."""
        if not self.ragged:
            return [self.seqlen_k] * self.batch
        if self.batch == 1:
            return [self.seqlen_k * 2 // 3]
        return [self.seqlen_k * b // (self.batch - 1) for b in range(self.batch)]

    @property
    def window_sides(self) -> tuple[int, int]:
        """Keys that a query sees on either side, -1 for no bound."""
        if self.window is not None or not self.spec.window:
            return self.window or (-1, -1)
        return self.seqlen_k // 3, self.seqlen_k // 5

    def inputs(self, device: torch.device | str = "cpu", *, drawn_there: bool = False) -> Inputs:
        """Unit-normal q, k, v in the spec's dtype, and the arguments of the call. The same on every device, unless q, k
        and v are `drawn_there`, which takes a fraction of the time."""
        generator = torch.Generator().manual_seed(self.seed)
        draws = torch.Generator(device).manual_seed(self.seed) if drawn_there else generator

        def tensor(seqlen: int, heads: int, dim: int) -> Tensor:
            shape = (1 if self.spec.varlen else self.batch, seqlen, heads, dim)
            x = torch.randn(shape, generator=draws, device=draws.device)
            x = lay_out(x.to(device, DTYPES[self.spec.dtype]), self.layout)
            return x[0] if self.spec.varlen else x

        call: dict[str, Any] = {}
        seqlen_q, seqlen_k = self.seqlen_q, self.seqlen_k
        if self.spec.varlen:
            of_q, of_k = zip(*self.lengths, strict=True) if self.batch else ((), ())
            for name, lengths in (("cu_seqlens_q", of_q), ("cu_seqlens_k", of_k)):
                call[name] = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
            seqlen_q, seqlen_k = sum(of_q), sum(of_k)
            call |= {"max_seqlen_q": self.seqlen_q, "max_seqlen_k": self.seqlen_k}
        q = tensor(seqlen_q, self.heads, self.spec.head_dim)
        k = tensor(seqlen_k, self.heads_k, self.spec.head_dim)
        v = tensor(seqlen_k, self.heads_k, self.spec.dim_v)
        if self.ragged:
            for b, count in enumerate(self.used):
                k[b, count:], v[b, count:] = math.nan, math.nan
        if self.softmax_scale is not None:
            call["softmax_scale"] = self.softmax_scale
        if self.spec.window or self.window is not None:
            call["window"] = self.window_sides
        if self.spec.dropout or self.dropout_p is not None:
            call["dropout_p"] = 0.2 if self.dropout_p is None else self.dropout_p
            call["seed"] = self.seed
        if self.spec.paged:
            if self.spec.varlen:  # pages belong to a sequence each
                k, v = (pad_sequence(list(torch.split(x, list(of_k))), batch_first=True) for x in (k, v))
            k, v, call["block_table"] = _in_pages(k, v, generator)
        if self.spec.split_kv:
            call["seqused_k"] = torch.tensor(self.used, dtype=torch.int32, device=device)
        if self.num_splits is not None:
            call["num_splits"] = self.num_splits
        context = CallContext(
            batch=self.batch,
            heads_q=self.heads,
            seqlen_q=self.seqlen_q,
            # A tensor over the keys has room for those of whole pages.
            seqlen_k=-(-self.seqlen_k // PAGE) * PAGE if self.spec.paged else self.seqlen_k,
            softmax_scale=self.softmax_scale or self.spec.head_dim**-0.5,
            device=torch.device("cpu"),
            dtype=self.spec.dtype,
        )
        examples = {mod.argument: mod.example(context) for mod in self.spec.valued}
        for name, given in (examples | dict(self.values)).items():
            value = given(self, generator) if callable(given) else given
            call[name] = value.to(device) if isinstance(value, Tensor) else value
        return Inputs(q, k, v, call)

    def upstream(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None]:
        """Unit-normal gradients of o (B, Sq, Hq, Dv), in the spec's dtype, and of lse (B, Hq, Sq), float32, or None; in
        the memory layout of the case. Packed, (Tq, Hq, Dv) and (Hq, Tq)."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        packed = self.spec.varlen
        batch, rows = (1, sum(length for length, _ in self.lengths)) if packed else (self.batch, self.seqlen_q)
        d_o = torch.randn(batch, rows, self.heads, self.spec.dim_v, generator=generator)
        d_o = lay_out(d_o.to(device, DTYPES[self.spec.dtype]), self.layout)
        d_lse = None
        if self.lse_gradient:
            d_lse = torch.randn(batch, self.heads, rows, 1, generator=generator).to(device)
            d_lse = lay_out(d_lse, self.layout).squeeze(3)
        if packed:
            return d_o[0], None if d_lse is None else d_lse[0]
        return d_o, d_lse

    def reference(self, inputs: Inputs, observe: Observe | None = None) -> tuple[Tensor, Tensor]:
        """o (B, Sq, Hq, Dv) and lse (B, Hq, Sq), or (Tq, Hq, Dv) and (Hq, Tq), in float64."""
        call = _for_reference(inputs) | {"causal": self.spec.causal, "observe": observe}
        if self.spec.varlen:
            return reference.packed(inputs.q, *self.keys_and_values(inputs), **call)
        if self.spec.split_kv:
            return self._reference_of_used(inputs, call)
        o, lse = reference.attention(inputs.q, inputs.k, inputs.v, **call)
        return o, lse

    def keys_and_values(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """k and v (B, Sk, Hk, ...), or (Tk, Hk, ...), out of their pages where they are in some."""
        if not self.spec.paged:
            return inputs.k, inputs.v
        table = inputs.call["block_table"].long()
        k, v = (x[table].flatten(1, 2) for x in (inputs.k, inputs.v))  # (B, keys of all pages of an entry, Hk, ...)
        if self.spec.varlen:
            k, v = (torch.cat([x[b, :n] for b, (_, n) in enumerate(self.lengths)]) for x in (k, v))
            return k, v
        return k[:, : self.seqlen_k], v[:, : self.seqlen_k]

    def _reference_of_used(self, inputs: Inputs, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The same where each batch entry has its own number of keys: as packed sequences, one at a time."""
        q, k, v = (x.flatten(0, 1) for x in (inputs.q, *self.keys_and_values(inputs)))
        begins = torch.arange(self.batch + 1)
        o, lse = reference.packed(q, k, v, begins * self.seqlen_q, begins * self.seqlen_k, **call)
        shape = (self.batch, self.seqlen_q)
        return o.view(*shape, *o.shape[1:]), lse.view(lse.shape[0], *shape).transpose(0, 1)

    def reference_gradients(
        self, inputs: Inputs, d_o: Tensor, d_lse: Tensor | None, observe: Observe | None = None
    ) -> tuple[Tensor, ...]:
        """dq, dk and dv in float64, then those of the values of `differentiable_values`."""
        call = _for_reference(inputs) | {"causal": self.spec.causal, "observe": observe}
        also = differentiable_values(self.spec, inputs)
        return reference.gradients(inputs.q, inputs.k, inputs.v, d_o, d_lse, also=also, **call)


def differentiable_values(spec: AttentionSpec, inputs: Inputs) -> list[str]:
    """The arguments of modifications whose values have a gradient: a mask has none."""
    able = [mod.argument for mod in spec.valued if mod.no_gradient(spec.deterministic) is None]
    return [argument for argument in able if inputs.call[argument].is_floating_point()]


def alibi_slopes_per_batch(case: Case, generator: torch.Generator) -> Tensor:
    """Slopes (B, Hq), uniform in [0, 1)."""
    return torch.rand(case.batch, case.heads, generator=generator)


def _for_reference(inputs: Inputs) -> dict[str, Any]:
    """The arguments of the call but for those that only save time, or say where all keys are."""
    left_out = ("max_seqlen_q", "max_seqlen_k", "block_table", "num_splits")
    return {name: value for name, value in inputs.call.items() if name not in left_out}


def _in_pages(k: Tensor, v: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """k and v (B, S, H, D) in pages in random order, (pages, PAGE, H, D), NaN where there is no key, and the
    block table (B, pages of an entry)."""
    batch, seqlen = k.shape[:2]
    each = -(-seqlen // PAGE)
    table = torch.randperm(batch * each + 1, generator=generator)[: batch * each].view(batch, each).to(k.device)
    pages = []
    for x in (k, v):
        padded = x.new_full((batch, each * PAGE, *x.shape[2:]), math.nan)
        padded[:, :seqlen] = x
        made = x.new_full((batch * each + 1, PAGE, *x.shape[2:]), math.nan)
        made[table.flatten()] = padded.view(batch * each, PAGE, *x.shape[2:])
        pages.append(made)
    return pages[0], pages[1], table.int()


def lay_out(x: Tensor, layout: Layout) -> Tensor:
    """The values of x (B, S, H, D) in another memory layout: heads outside the sequence; a slice of a larger tensor
    that is NaN everywhere else, as are the elements beside each row; or the first batch entry expanded, stride 0."""
    batch, seqlen, heads, dim = x.shape
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        parent = x.new_full((batch + 1, seqlen + 3, heads + 1, dim + 16), math.nan)
        view = parent[:batch, 2 : seqlen + 2, 1:, 8 : 8 + dim]
        return view.copy_(x)
    if layout == "expanded":
        return x[:1].expand(batch, -1, -1, -1)
    return x


@dataclass(frozen=True)
class Worst:
    """The element that is furthest off for what it may be; `dim` is None for lse. A row of dk or dv is a key's."""

    batch: int
    head: int
    row: int
    dim: int | None
    value: float
    reference: float


def place(result: str, worst: Worst) -> str:
    """Where the worst element of "o", "lse", "dq", "dk" or "dv" is, and what it is, for people."""
    row = "key" if result in ("dk", "dv") else "row"
    dim = "" if worst.dim is None else f", dim {worst.dim}"
    where = f"batch {worst.batch}, head {worst.head}, {row} {worst.row}{dim}"
    return f"{where}: kernel {worst.value:+.6g}, reference {worst.reference:+.6g}"


@dataclass(frozen=True)
class Comparison:
    """One result beside its reference. `error` and `budget`: relative norm for o and gradients, largest absolute error
    for lse (whose budget grows with the magnitude, see `compare_lse`); `elementwise` is the worst element's error over
    its own bound.
    """

    error: float
    budget: float
    elementwise: float
    worst: Worst | None  # None where there are no elements
    passed: bool


def compare_o(o: Tensor, expected: Tensor, budget: float) -> Comparison:
    """o against its reference, both (B, S, H, Dv) or (T, H, Dv): ||o - ref|| / ||ref|| within `budget`, every element
    within ELEMENT_FACTOR budgets of its own magnitude plus the root mean square of its row, and UNDERFLOW. A row that
    is zero in the reference, as one that sees nothing, must be exactly zero. NaN never passes."""
    value = _same_shape("o", o, expected)
    expected = expected.double()
    if value.dim() == 3:
        value, expected = value[None], expected[None]
    if not value.numel():
        return Comparison(0.0, budget, 0.0, None, True)
    difference = (value - expected).abs()
    norm = float(torch.linalg.vector_norm(expected))
    error = _ratio(float(torch.linalg.vector_norm(difference)), norm)
    rms = expected.square().mean(dim=3, keepdim=True).sqrt()
    underflow = UNDERFLOW.get(o.dtype, 0.0) * (rms > 0)
    elementwise, (b, i, h, d) = _worst(difference, ELEMENT_FACTOR * budget * (expected.abs() + rms) + underflow)
    worst = Worst(b, h, i, d, float(value[b, i, h, d]), float(expected[b, i, h, d]))
    return Comparison(error, budget, elementwise, worst, error <= budget and elementwise <= 1)


def compare_lse(lse: Tensor, expected: Tensor) -> Comparison:
    """lse against its reference, both (B, H, S) or (H, T): every element within 1e-4, or 1e-6 of its magnitude where
    that is more; -inf exactly where the reference has it. NaN never passes."""
    value = _same_shape("lse", lse, expected)
    expected = expected.double()
    if value.dim() == 2:
        value, expected = value[None], expected[None]
    if not value.numel():
        return Comparison(0.0, LSE_ABSOLUTE, 0.0, None, True)
    # inf - inf is NaN: equal elements differ by 0, and one infinity against a number by infinity.
    difference = (value - expected).abs().masked_fill(value == expected, 0.0)
    bound = (LSE_RELATIVE * expected.abs()).clamp(min=LSE_ABSOLUTE).masked_fill(torch.isinf(expected), LSE_ABSOLUTE)
    elementwise, (b, h, i) = _worst(difference, bound)
    worst = Worst(b, h, i, None, float(value[b, h, i]), float(expected[b, h, i]))
    return Comparison(float(difference[b, h, i]), float(bound[b, h, i]), elementwise, worst, elementwise <= 1)


def compare_gradient(
    x: Tensor, expected: Tensor, budget: float, seen: Tensor, besides: Tensor | None = None
) -> Comparison:
    """dq, dk or dv, (B, S, H, D) or (T, H, D), against its reference: ||x - ref|| / ||ref|| within `budget`, and every
    element within GRADIENT_ELEMENT_FACTOR budgets of its own magnitude plus the root mean square of its row, and
    CANCELLATION_FACTOR of that of the largest row. `seen` (S,) says which rows take part in the call: the others must
    be exactly zero. `besides`, of x's shape, is what an element may be off by in addition. NaN never passes."""
    value = _same_shape("a gradient", x, expected)
    expected = expected.double()
    if value.dim() == 3:
        value, expected = value[None], expected[None]
    if not value.numel():
        return Comparison(0.0, budget, 0.0, None, True)
    difference = (value - expected).abs()
    norm = max(float(torch.linalg.vector_norm(expected)), VANISHING * math.sqrt(expected.numel()))
    error = float(torch.linalg.vector_norm(difference)) / norm
    bound = gradient_bound(expected, budget)
    if besides is not None:
        bound = bound + besides
    bound = bound.masked_fill(~seen.to(bound.device)[None, :, None, None], 0.0)
    elementwise, (b, i, h, d) = _worst(difference, bound)
    worst = Worst(b, h, i, d, float(value[b, i, h, d]), float(expected[b, i, h, d]))
    return Comparison(error, budget, elementwise, worst, error <= budget and elementwise <= 1)


def gradient_bound(expected: Tensor, budget: float) -> Tensor:
    """What each element of a gradient, (..., D), may be off by."""
    rms = expected.square().mean(dim=-1, keepdim=True).sqrt()
    largest = float(rms.max().clamp(min=VANISHING))
    return budget * (GRADIENT_ELEMENT_FACTOR * (expected.abs() + rms) + CANCELLATION_FACTOR * largest)


def compare_sum(x: Tensor, expected: Tensor, budget: float, terms: Tensor) -> Comparison:
    """(Hq,) against its reference, each a sum of many terms of either sign, the root of whose squares is `terms`: the
    errors of these add up even where they cancel. ||x - ref|| within `budget` of the larger of ||ref|| and ||terms||,
    and each element within GRADIENT_ELEMENT_FACTOR budgets of the two together. NaN never passes."""
    value = _same_shape("a gradient", x, expected)
    difference = (value - expected).abs()
    size = max(float(torch.linalg.vector_norm(expected)), float(torch.linalg.vector_norm(terms)))
    error = _ratio(float(torch.linalg.vector_norm(difference)), size)
    elementwise, (head,) = _worst(difference, GRADIENT_ELEMENT_FACTOR * budget * (expected.abs() + terms))
    worst = Worst(0, head, 0, None, float(value[head]), float(expected[head]))
    return Comparison(error, budget, elementwise, worst, error <= budget and elementwise <= 1)


def _error_of_delta(case: Case, inputs: Inputs) -> tuple[Tensor, ...]:
    """What the rounding of o may do to the gradients of values: dS = P (dP - delta), where delta = sum of o dO over the
    head dim. A row's error of delta is normal, with the unit roundoff over the root of 3 times ||o dO||; P times it,
    summed over what a value's element serves, is the gradient of lse with that as upstream."""
    o, _ = case.reference(inputs)
    d_o, _ = case.upstream(inputs.q.device)
    rows = torch.linalg.vector_norm(o * d_o.double(), dim=-1).transpose(-1, -2)  # as lse
    deviation = torch.finfo(d_o.dtype).eps / 2 / math.sqrt(3) * rows
    return case.reference_gradients(inputs, torch.zeros_like(d_o), DELTA_FACTOR * deviation)[3:]


def _terms_of_sink(case: Case, inputs: Inputs) -> Tensor:
    """(Hq,): the root of the sum of squares of what the rows of a head contribute to the gradient of its sink."""
    o, lse = case.reference(inputs)
    d_o, d_lse = case.upstream(inputs.q.device)
    delta = (o * d_o.double()).sum(-1).transpose(-1, -2)  # as lse: (B, Hq, Sq) or (Hq, Tq)
    if d_lse is not None:
        delta = delta - d_lse.double()
    weight = torch.exp(inputs.call["sink"].double()[:, None] - lse).masked_fill(lse == -math.inf, 0.0)
    squares = (weight * delta).square().sum(-1)
    return (squares.sum(0) if squares.dim() == 2 else squares).sqrt()


def compare_gradients(
    case: Case,
    inputs: Inputs,
    gradients: tuple[Tensor, ...],
    expected: tuple[Tensor, ...],
    flash: FlashErrors,
) -> dict[str, Comparison]:
    """`compare_gradient` of dq, dk, dv and those of values: the budget is the dtype's, or what PyTorch's flash kernel
    loses, if more. Where a value's last two dimensions are queries and keys, they are a row and an element of it."""
    window = inputs.call.get("window", (-1, -1))
    lengths = case.lengths if case.spec.varlen else [(case.seqlen_q, case.seqlen_k)]
    seen_each = [reference.seen(*pair, causal=case.spec.causal, window=window) for pair in lengths]
    rows, keys = (torch.cat(parts) for parts in zip(*seen_each, strict=True))
    results = {}
    for name, x, ref, seen in zip(("dq", "dk", "dv"), gradients, expected, (rows, keys, keys), strict=False):
        budget = max(GRADIENT_BUDGET[case.spec.dtype], FLASH_FACTOR * flash.get(name, 0.0))
        results[name] = compare_gradient(x, ref, budget, seen)
    names = differentiable_values(case.spec, inputs)
    besides = _error_of_delta(case, inputs) if names else ()
    for name, *each in zip(names, gradients[3:], expected[3:], besides, strict=True):
        if name == "sink":
            x, ref, _ = each
            results["dsink"] = compare_sum(x, ref, GRADIENT_BUDGET[case.spec.dtype], _terms_of_sink(case, inputs))
            continue
        x, ref, error = (y[(None,) * (4 - y.dim())].transpose(1, 2) for y in each)
        everywhere = torch.ones(x.shape[1], dtype=torch.bool)
        results[f"d{name}"] = compare_gradient(x, ref, GRADIENT_BUDGET[case.spec.dtype], everywhere, error)
    return results


def differentiate(
    attention: Attention, inputs: Inputs, d_o: Tensor, d_lse: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """o, lse and (dq, dk, dv, then those of values) of one call, through autograd. All memory that the call takes holds
    NaN before."""
    leaves, call = _leaves(attention.spec, inputs)
    with poisoned_memory():
        o, lse = attention(*leaves[:3], return_lse=True, **call)
        if d_lse is None:
            gradients = torch.autograd.grad(o, leaves, d_o)
        else:
            gradients = torch.autograd.grad((o, lse), leaves, (d_o, d_lse))
    return o.detach(), lse.detach(), gradients


def _leaves(spec: AttentionSpec, inputs: Inputs) -> tuple[list[Tensor], dict[str, Any]]:
    """q, k, v and the differentiable values, which require gradients, and the arguments of the call with those."""
    names = differentiable_values(spec, inputs)
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, *(inputs.call[n] for n in names))]
    return leaves, inputs.call | dict(zip(names, leaves[3:], strict=True))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that PyTorch hands out uninitialised holds NaN, in backward passes too."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def flash_error(case: Case, inputs: Inputs, expected: Tensor) -> float | None:
    """||x - ref|| / ||ref|| of o of PyTorch's own flash kernel on these inputs; None where it cannot say."""
    call = _flash_call(case, inputs)
    return None if call is None else _relative_error(call.o, expected)


def flash_gradient_errors(case: Case, inputs: Inputs, d_o: Tensor, expected: tuple[Tensor, ...]) -> FlashErrors:
    """||x - ref|| / ||ref|| of dq, dk and dv of PyTorch's own flash kernel; empty where it cannot say. Its gradients of
    the query heads that share a head are summed in float64: what that loses in 16 bits is not its kernel's doing."""
    call = None if case.lse_gradient else _flash_call(case, inputs, grad=True)
    if call is None:
        return {}
    dq, dk, dv = torch.autograd.grad(call.o, (call.q, call.k, call.v), d_o)
    shape = (case.batch, case.heads_k, case.heads // case.heads_k, case.seqlen_k, case.spec.head_dim)
    dk, dv = (x.double().reshape(shape).sum(2) for x in (dk, dv))
    values = {"dq": dq.transpose(1, 2), "dk": dk.transpose(1, 2), "dv": dv.transpose(1, 2)}
    return {name: _relative_error(x, ref) for (name, x), ref in zip(values.items(), expected, strict=False)}


@dataclass(frozen=True)
class _FlashCall:
    """One call of PyTorch's flash kernel: o (B, Sq, Hq, D); q, k, v (B, Hq, S, D), a head of k and v per query head."""

    o: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def _flash_call(case: Case, inputs: Inputs, grad: bool = False) -> _FlashCall | None:
    """None without a GPU or where SDPA's flash backend cannot express the call: it has no modifications, windows or
    such dropout, one head dim, and aligns causal masks to the top left."""
    spec = case.spec
    expressible = not (spec.valued or spec.window or spec.dropout or spec.varlen or spec.paged or case.ragged)
    if spec.dim_v != spec.head_dim:
        expressible = False
    if spec.causal and case.seqlen_q != case.seqlen_k:
        expressible = False
    if max(case.batch, case.heads) > 65535:  # its launch puts each in a grid dimension of its own
        expressible = False
    empty = not (case.batch and case.seqlen_q and case.seqlen_k)
    if not expressible or empty or inputs.q.device.type != "cuda":
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group = case.heads // case.heads_k
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    q, k, v = (
        x.detach().requires_grad_(grad) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=spec.causal, scale=inputs.call.get("softmax_scale")
        )
    return _FlashCall(o.transpose(1, 2), q, k, v)


@dataclass(frozen=True)
class CheckResult:
    """What `check` found. The fields of `shape` are batch, heads, heads_k, seqlen_q and seqlen_k."""

    spec: AttentionSpec
    slug: str  # of the main kernel: the backward's, if the spec has one
    arch: str
    device: str  # the card's name, or "CPU (emulated)"
    emulated: bool
    shape: dict[str, int]
    seed: int
    o: Comparison
    lse: Comparison
    gradients: dict[str, Comparison]  # dq, dk, dv and those of values; empty for a spec without backward
    flash_error: float | None  # what PyTorch's flash kernel loses of o on these inputs; None where it cannot say
    flash_gradient_errors: FlashErrors
    first_values: list[float]  # of o, from the first element on
    first_reference: list[float]
    seconds: float  # one call: the median of several on a GPU, without the build
    backward_seconds: float | None  # its gradients, likewise
    smem_bytes: int  # dynamic shared memory a block
    passed: bool

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON can hold them: numbers that are not finite as strings."""
        fields = asdict(self) | {"spec": self.spec.model_dump(mode="json")}
        return {name: jsonable(value) for name, value in fields.items()}


def check(
    spec: AttentionSpec,
    *,
    arch: str | None = None,
    emulate: bool | None = None,
    batch: int | None = None,
    heads: int | None = None,
    heads_k: int | None = None,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    seed: int = 0,
) -> CheckResult:
    """Builds the kernels of `spec`, runs them on the GPU if there is one, else emulated, and compares with float64.

    With spec.backward the gradients too, of a loss that depends on o and, in a second call, on lse as well. Results are
    filled with NaN before the launch. Sizes that are not given: 2 batch entries, twice as many query
    heads as key heads, and lengths that are no multiple of a tile, larger on a GPU than emulated.

    Raises SpecError for sizes that cannot be, and what `fagen.load` raises.
    """
    from fagen.ops import load

    emulated = not torch.cuda.is_available() if emulate is None else emulate
    device = torch.device("cpu") if emulated else torch.device("cuda", torch.cuda.current_device())
    case = default_case(spec, emulated, batch, heads, heads_k, seqlen_q, seqlen_k, seed)
    inputs = case.inputs(device)
    attention = load(spec, arch=arch, emulate=emulated)

    def call(poison: bool = False) -> Any:
        return attention(inputs.q, inputs.k, inputs.v, return_lse=True, _poison=poison, **inputs.call)

    start = time.perf_counter()
    o, lse = call(poison=True)
    seconds = time.perf_counter() - start if emulated else seconds_on_gpu(call)

    expected_o, expected_lse = case.reference(inputs)
    flash = flash_error(case, inputs, expected_o)
    result_o, result_lse = compare_o(o, expected_o, output_budget(spec, flash)), compare_lse(lse, expected_lse)
    gradients: dict[str, Comparison] = {}
    flash_gradients: FlashErrors = {}
    backward_seconds = None
    if spec.backward:
        gradients, flash_gradients = _check_gradients(case, attention, inputs)
        backward_seconds = seconds_of_gradients(case, attention, inputs)
    kernel = main_kernel([kernel.plan for kernel in attention.kernels(device).values()])
    return CheckResult(
        spec=spec,
        slug=kernel.slug,
        arch=kernel.arch.name,
        device="CPU (emulated)" if emulated else torch.cuda.get_device_name(device),
        emulated=emulated,
        shape={name: getattr(case, name) for name in ("batch", "heads", "heads_k", "seqlen_q", "seqlen_k")},
        seed=seed,
        o=result_o,
        lse=result_lse,
        gradients=gradients,
        flash_error=flash,
        flash_gradient_errors=flash_gradients,
        first_values=o.flatten()[:FIRST_VALUES].tolist(),
        first_reference=expected_o.flatten()[:FIRST_VALUES].tolist(),
        seconds=seconds,
        backward_seconds=backward_seconds,
        smem_bytes=kernel.smem_bytes,
        passed=all(result.passed for result in (result_o, result_lse, *gradients.values())),
    )


def main_kernel(kernels: Sequence[KernelPlan]) -> KernelPlan:
    """Of the kernels of a spec the one that has all of its features: the backward's, if it has one."""
    return next(kernel for kernel in kernels if kernel.kind == ("bwd" if kernels[0].spec.backward else "fwd"))


def output_budget(spec: AttentionSpec, flash: float | None) -> float:
    """What ||o - ref|| / ||ref|| may be: the dtype's budget, or what PyTorch's flash kernel loses, if more."""
    return max(OUTPUT_BUDGET[spec.dtype], FLASH_FACTOR * (flash or 0.0))


def judge(case: Case, attention: Attention, device: torch.device | str) -> dict[str, Comparison]:
    """One call beside its reference: "o", "lse" and, with spec.backward, "dq", "dk", "dv" and those of values. Results
    are filled with NaN before the launch."""
    inputs = case.inputs(device)
    gradients: dict[str, Comparison] = {}
    if case.spec.backward:
        d_o, d_lse = case.upstream(device)
        o, lse, found = differentiate(attention, inputs, d_o, d_lse)
        expected = case.reference_gradients(inputs, d_o, d_lse)
        gradients = compare_gradients(case, inputs, found, expected, flash_gradient_errors(case, inputs, d_o, expected))
    else:
        o, lse = attention(inputs.q, inputs.k, inputs.v, return_lse=True, _poison=True, **inputs.call)
    expected_o, expected_lse = case.reference(inputs)
    budget = output_budget(case.spec, flash_error(case, inputs, expected_o))
    return {"o": compare_o(o, expected_o, budget), "lse": compare_lse(lse, expected_lse), **gradients}


def seconds_of_gradients(case: Case, attention: Attention, inputs: Inputs) -> float:
    """One backward pass, the forward's time left out: the median of several on a GPU."""
    leaves, call = _leaves(case.spec, inputs)
    d_o, _ = case.upstream(inputs.q.device)
    o = attention(*leaves[:3], **call)

    def backward() -> Any:
        return torch.autograd.grad(o, leaves, d_o, retain_graph=True)

    if inputs.q.device.type == "cuda":
        return seconds_on_gpu(backward)
    start = time.perf_counter()
    backward()
    return time.perf_counter() - start


def _check_gradients(case: Case, attention: Attention, inputs: Inputs) -> tuple[dict[str, Comparison], FlashErrors]:
    """What of each gradient is worse: of a loss of o alone, or of one of o and lse."""
    results: dict[str, Comparison] = {}
    flash: FlashErrors = {}
    for loss in (case, replace(case, lse_gradient=True)):
        d_o, d_lse = loss.upstream(inputs.q.device)
        expected = loss.reference_gradients(inputs, d_o, d_lse)
        flash = flash or flash_gradient_errors(loss, inputs, d_o, expected)
        _, _, gradients = differentiate(attention, inputs, d_o, d_lse)
        compared = compare_gradients(loss, inputs, gradients, expected, flash)
        for name, result in compared.items():
            if name not in results or badness(result) > badness(results[name]):
                results[name] = result
    return results, flash


def badness(result: Comparison) -> float:
    """How far off a result is for what it may be: infinite for NaN."""
    ratio = max(result.error / result.budget, result.elementwise)
    return math.inf if math.isnan(result.error) else ratio


def default_case(
    spec: AttentionSpec,
    emulated: bool,
    batch: int | None = None,
    heads: int | None = None,
    heads_k: int | None = None,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    seed: int = 0,
) -> Case:
    """The case that `check` runs: what is not given follows from what is."""
    heads, heads_k = pair_of_heads(heads, heads_k)
    length = 150 if emulated else 2000
    seqlen_q = length if seqlen_q is None else seqlen_q
    seqlen_k = seqlen_q + 20 if seqlen_k is None else seqlen_k
    batch = 2 if batch is None else batch
    for name, size in (("batch", batch), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if size < 0:
            raise SpecError(f"{name}={size} must not be negative")
    return Case(spec=spec, batch=batch, heads=heads, heads_k=heads_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k, seed=seed)


def pair_of_heads(heads: int | None, heads_k: int | None) -> tuple[int, int]:
    """Heads of q and of k and v: what is not given follows from what is. Raises SpecError where they do not go
    together."""
    if heads is None:
        heads = 2 if heads_k is None else 2 * heads_k
    if heads_k is None:
        heads_k = heads // 2 if heads % 2 == 0 else heads
    if heads < 1 or heads_k < 1 or heads % heads_k:
        raise SpecError(f"heads={heads} must be a positive multiple of heads_k={heads_k}")
    return heads, heads_k


def seconds_on_gpu(call: Callable[[], Any], calls: int = 10) -> float:
    """Median duration of a call by CUDA events, in seconds, after two that warm up."""
    call(), call()
    pairs = [(_event(), _event()) for _ in range(calls)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in pairs)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def jsonable(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are not finite as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    return value


def _same_shape(name: str, value: Tensor, expected: Tensor) -> Tensor:
    if value.shape != expected.shape:
        raise LaunchError(f"{name} has the shape {tuple(value.shape)}, the reference {tuple(expected.shape)}")
    return value.detach().double()


def _ratio(error: float, size: float) -> float:
    """error / size, where nothing off nothing is 0 and something off nothing is infinite."""
    if size:
        return error / size
    return 0.0 if error == 0 else math.inf if error > 0 else math.nan


def _relative_error(x: Tensor, expected: Tensor) -> float:
    difference = float(torch.linalg.vector_norm(x.detach().double() - expected))
    return _ratio(difference, float(torch.linalg.vector_norm(expected)))


def _worst(difference: Tensor, bound: Tensor) -> tuple[float, tuple[int, ...]]:
    """The largest difference / bound and its index; NaN counts as infinite, 0 / 0 as 0."""
    ratio = torch.where(difference == 0, 0.0, difference / bound).nan_to_num(nan=math.inf, posinf=math.inf)
    flat = int(ratio.argmax())
    return float(ratio.flatten()[flat]), tuple(int(index) for index in _unravel(flat, ratio.shape))


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, remainder = divmod(flat, size)
        index.append(remainder)
    return tuple(reversed(index))
