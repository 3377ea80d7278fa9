"""Tuning on a GPU: checks kernels with given tiles and times their calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fagen import tuned
from fagen.arch import Arch
from fagen.bench import decode as decode_bench
from fagen.bench import speed
from fagen.check import (
    FLASH_FACTOR,
    GRADIENT_BUDGET,
    OUTPUT_BUDGET,
    Case,
    Comparison,
    Inputs,
    badness,
    compare_gradients,
    compare_lse,
    compare_o,
    differentiate,
    flash_error,
    flash_gradient_errors,
)
from fagen.driver import Gpu
from fagen.errors import FagenError, LaunchError, SpecError
from fagen.kernels import card
from fagen.ops import Attention, PlannedAttention
from fagen.plan import KernelPlan, Kind
from fagen.spec import AttentionSpec
from fagen.tune import FEW_SAMPLES, Shape


class Judge:
    """A small case, and float64 of it: what results of any tile are compared with."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case = case
        self._inputs = inputs = case.inputs(device)
        self._o, self._lse = case.reference(inputs)
        flash = flash_error(case, inputs, self._o) or 0.0
        self._budget = max(OUTPUT_BUDGET[case.spec.dtype], FLASH_FACTOR * flash)
        self._losses = []
        for loss in (case, replace(case, lse_gradient=True)) if case.spec.backward else ():
            d_o, d_lse = loss.upstream(device)
            expected = loss.reference_gradients(inputs, d_o, d_lse)
            errors = flash_gradient_errors(loss, inputs, d_o, expected)
            self._losses.append((loss, d_o, d_lse, expected, errors))

    def problem(self, attention: Attention) -> str | None:
        """What of the results is past its budget; None where nothing is."""
        inputs = self._inputs
        o, lse = attention(inputs.q, inputs.k, inputs.v, return_lse=True, _poison=True, **inputs.call)
        results = {"o": compare_o(o, self._o, self._budget), "lse": compare_lse(lse, self._lse)}
        for loss, d_o, d_lse, expected, errors in self._losses:
            _, _, gradients = differentiate(attention, inputs, d_o, d_lse)
            for name, result in compare_gradients(loss, inputs, gradients, expected, errors).items():
                if name not in results or badness(result) > badness(results[name]):
                    results[name] = result
        wrong = {name: result for name, result in results.items() if not result.passed}
        return _described(wrong, self._case) if wrong else None


def judges(spec: AttentionSpec, device: torch.device, lengths: Sequence[tuple[int, int]]) -> list[Judge]:
    """Judges of small cases: `lengths` are pairs of queries and keys, no multiples of any tile."""
    parts = (None, 3) if spec.split_kv else (None,)
    return [
        Judge(Case(spec=spec, batch=2, heads=4, heads_k=2, seqlen_q=sq, seqlen_k=sk, num_splits=splits), device)
        for (sq, sk), splits in itertools.product(lengths, parts)
    ]


def _described(wrong: Mapping[str, Comparison], case: Case) -> str:
    name, result = max(wrong.items(), key=lambda item: badness(item[1]))
    return f"{name} is off by {result.error:.2e} of {result.budget:.2e} ({case.seqlen_q} queries, {case.seqlen_k} keys)"


class Card:
    """The current GPU. Raises SpecError where there is none, or `arch` is not for it."""

    def __init__(self, arch: Arch) -> None:
        if not torch.cuda.is_available():
            raise SpecError(tuned.NO_CARD)
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._card = card(self._device.index)
        if not runs_on(arch, self._card.capability):
            major, minor = self._card.capability
            raise SpecError(
                f"kernels for {arch.name} do not run on {self._card.name}, of compute capability {major}.{minor}"
            )
        self._judges: dict[AttentionSpec, list[Judge]] = {}

    @property
    def card(self) -> Gpu:
        return self._card

    def check(self, spec: AttentionSpec, kernels: Sequence[KernelPlan]) -> str | None:
        if spec not in self._judges:
            lengths = [(3, 1000), (40, 700)] if spec.split_kv else [(300, 700), (333, 150)]
            self._judges[spec] = judges(spec, self._device, lengths)
        try:
            attention = PlannedAttention(spec, kernels, self._device)
            found = next((reason for one in self._judges[spec] if (reason := one.problem(attention))), None)
            torch.cuda.synchronize()
        except (FagenError, RuntimeError) as error:
            return self._stopped(error)
        return found

    def time(
        self,
        spec: AttentionSpec,
        kind: Kind,
        contestants: Mapping[str, Sequence[KernelPlan]],
        shape: Shape,
        samples: int,
    ) -> dict[str, float | str]:
        problem = _Problem(spec, kind, shape, self._device)
        calls: dict[str, Callable[[], Any]] = {}
        results: dict[str, float | str] = {}
        expected: tuple[Tensor, ...] | None = None
        for name, kernels in contestants.items():
            try:
                call, outputs = problem.prepare(PlannedAttention(spec, kernels, self._device))
                torch.cuda.synchronize()
            except (FagenError, RuntimeError) as error:
                results[name] = self._stopped(error)
                continue
            expected = outputs if expected is None else expected
            apart = problem.apart(outputs, expected)
            if apart is None:
                calls[name] = call
            else:
                results[name] = apart
        if samples <= FEW_SAMPLES:
            seconds = speed.take_turns(calls, samples, warm_up_seconds=0.0, warm_up_rounds=1)
        else:
            seconds = speed.take_turns(calls, samples)
        count = problem.calls
        del problem, calls, expected
        torch.cuda.empty_cache()  # the sizes of the next shape fit into none of the blocks that this one leaves
        return results | {name: taken / count for name, taken in seconds.items()}

    def _stopped(self, error: Exception) -> str:
        """Why a kernel is out. LaunchError where nothing runs on the card any more."""
        said = speed.first_line(error)
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise LaunchError(f"a tile has stopped the card, on which this process can do no more: {said}") from error
        return said


def runs_on(arch: Arch, capability: tuple[int, int]) -> bool:
    """Whether a card of that compute capability runs kernels for `arch`."""
    if arch.name.startswith("sm90a"):
        return capability == (9, 0)
    if arch.ptx_only:
        return arch.capability <= capability
    return arch.capability[0] == capability[0] and arch.capability <= capability


class _Problem:
    """Tensors of one shape, and the calls on them that are timed."""

    def __init__(self, spec: AttentionSpec, kind: Kind, shape: Shape, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._gradients = kind in ("bwd", "bwd_dq")
        inputs = inputs_of(spec, shape, device)
        self._inputs = [inputs]
        self.calls = 1  # of a replay
        self._kept: list[Any] = []  # a graph knows addresses only: what its calls hold must live as long
        if spec.split_kv:  # calls of some microseconds: replayed as a CUDA graph, of keys that no cache holds
            size = inputs.k.nbytes + inputs.v.nbytes
            cache_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
            copies = decode_bench.copies(size, cache_bytes)
            self._inputs += [replace(inputs, k=inputs.k.clone(), v=inputs.v.clone()) for _ in range(copies - 1)]
            self.calls = decode_bench.calls(size, copies)

    def prepare(self, attention: Attention) -> tuple[Callable[[], Any], tuple[Tensor, ...]]:
        """The call to time, and what it returns."""

        def of(inputs: Inputs) -> Callable[[], Tensor]:
            qkv = [x.detach().requires_grad_(self._spec.backward) for x in (inputs.q, inputs.k, inputs.v)]
            return lambda: attention(*qkv, **inputs.call)

        first = of(self._inputs[0])
        if self._spec.split_kv:
            output = first().clone()
            calls = [of(inputs) for inputs in self._inputs]
            self._kept.append(calls)
            return decode_bench.captured(calls, self.calls), (output,)
        if not self._gradients:
            return first, (first().detach(),)
        leaves = [x.detach().requires_grad_() for x in (self._inputs[0].q, self._inputs[0].k, self._inputs[0].v)]
        o = attention(*leaves, **self._inputs[0].call)
        generator = torch.Generator(self._device).manual_seed(1)
        d_o = torch.randn(o.shape, generator=generator, device=o.device, dtype=o.dtype)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(o, leaves, d_o, retain_graph=True)

        return backward, backward()

    def apart(self, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
        """How far apart two results are, if further than two that are right can be."""
        budgets = GRADIENT_BUDGET if self._gradients else OUTPUT_BUDGET
        for one, other in zip(outputs, expected, strict=True):
            difference = float(torch.linalg.vector_norm(one.float() - other.float()))
            size = float(torch.linalg.vector_norm(other.float()))
            if not difference <= 2 * budgets[self._spec.dtype] * size:  # NaN is not
                return (
                    f"its result is off from that of the table's tile by {difference / size if size else math.inf:.2e}"
                )
        return None


def inputs_of(spec: AttentionSpec, shape: Shape, device: torch.device) -> Inputs:
    """Unit-normal tensors of a shape, drawn on the device; packed, sequences of equal lengths. Caps are those of
    `fagen bench`, windows a quarter of the keys to both sides."""
    values = {"softcap": speed.SOFTCAP} if spec.softcap else {}
    window = (shape.seqlen_k // 4, shape.seqlen_k // 4) if spec.window else None
    cut_into = shape.batch if spec.varlen else 1  # packed sequences are drawn as one
    inputs = Case(
        spec=spec,
        batch=shape.batch // cut_into,
        heads=shape.heads,
        heads_k=shape.heads_k,
        seqlen_q=shape.seqlen_q * cut_into,
        seqlen_k=shape.seqlen_k * cut_into,
        window=window,
        values=values,
    ).inputs(device, drawn_there=True)
    if not spec.varlen:
        return inputs
    begins = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    cut = {
        "cu_seqlens_q": begins * shape.seqlen_q,
        "cu_seqlens_k": begins * shape.seqlen_k,
        "max_seqlen_q": shape.seqlen_q,
        "max_seqlen_k": shape.seqlen_k,
    }
    if spec.paged:
        cut["block_table"] = inputs.call["block_table"].view(shape.batch, -1)
    return replace(inputs, call=inputs.call | cut)
