"""`fagen.load` and the callable it returns: from tensors to launches, and gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Literal, overload

import torch
from torch.autograd import forward_ad

from fagen import kernels, registry, target
from fagen.arch import Arch, for_capability, resolve
from fagen.cache import Artifact
from fagen.call import ALIGNMENT, DTYPES, Packed, Values, aligned, check_given, check_one_place, philox_state
from fagen.errors import LaunchError, SpecError
from fagen.kernels import Kernel
from fagen.mods import SINK
from fagen.operators import SECOND_DERIVATIVE
from fagen.plan import KernelPlan
from fagen.prepared import MOST, Call, Gradients, Recent, Saved
from fagen.spec import AttentionSpec

log = logging.getLogger("fagen")


def load(spec: AttentionSpec, *, arch: str | None = None, emulate: bool | None = None) -> Attention:
    """The attention that `spec` describes, built if the cache lacks it.

    arch: "sm80", "sm90", ...; default the card's, without one FAGEN_ARCH or TORCH_CUDA_ARCH_LIST, without those sm80.
    emulate: True runs the kernels on the CPU, False on the GPU; None decides by where the tensors of a call are.

    Raises SpecError for an unknown architecture, ToolchainError where no compiler is found, BuildError where one fails,
    LaunchError for emulate=False without a GPU.
    """
    attention = Attention(spec, arch=arch, emulate=emulate)
    attention.prepare()
    return attention


class Attention:
    """A callable attention kernel. Made by `fagen.load`; safe to call from several threads."""

    def __init__(self, spec: AttentionSpec, *, arch: str | None = None, emulate: bool | None = None) -> None:
        if not isinstance(spec, AttentionSpec):
            raise SpecError(
                f"spec must be an AttentionSpec, got {type(spec).__name__}: AttentionSpec(head_dim=64, ...)"
            )
        self.spec = spec
        self.emulate = emulate
        self._arch = None if arch is None else resolve(arch)
        self._kernels: dict[torch.device, dict[str, Kernel]] = {}
        self._calls: dict[Any, Call] = {}
        self._recent = Recent()
        # What a call needs of the spec, where pydantic's and properties' time would count, and torch.compile looks.
        self._identity = (spec.model_dump_json(), arch or "")
        self._dtype = DTYPES[spec.dtype]
        self._wanted = tuple((mod.name, mod.argument) for mod in spec.valued)
        others = [mod for mod in (*registry.known(), SINK) if mod not in spec.valued]
        self._unwanted = tuple((mod.name, mod.argument) for mod in others)
        reasons = {mod.argument: mod.no_gradient(spec.deterministic) for mod in spec.valued}
        self._without_gradient = {argument: reason for argument, reason in reasons.items() if reason}
        self._backward = spec.backward
        self._dropout = spec.dropout
        self._varlen = spec.varlen

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also by pickle in another process, builds and loads anew what the cache there lacks."""
        return _restored, (self.spec, None if self._arch is None else self._arch.name, self.emulate)

    def prepare(self) -> None:
        """Builds and loads the kernels for the device that calls will most likely use."""
        if self.emulate or (self.emulate is None and not torch.cuda.is_available()):
            self.kernels("cpu")
        elif not torch.cuda.is_available():
            raise LaunchError("emulate=False, and PyTorch finds no GPU here: leave emulate out; fagen doctor says more")
        else:
            self.kernels(torch.device("cuda", torch.cuda.current_device()))

    def artifact(self, device: torch.device | str, kind: str = "fwd") -> Artifact:
        """What was built for tensors on `device`; `kind` names one of the spec's kernels."""
        return self.kernels(device)[kind].artifact

    def kernel(self, device: torch.device | str, kind: str = "fwd") -> KernelPlan:
        """The plan of the kernel that runs for tensors on `device`."""
        return self.kernels(device)[kind].plan

    def kernels(self, device: torch.device | str) -> dict[str, Kernel]:
        """The kernels for tensors on `device` by kind, built and loaded."""
        device = torch.device(device)
        if device not in self._kernels:
            self._check_device(device)
            index = None
            if device.type == "cuda":
                index = torch.cuda.current_device() if device.index is None else device.index
            self._kernels[device] = kernels.load(self.spec, self._arch or default_arch(index), index)
        return self._kernels[device]

    @overload
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        window: tuple[int, int] | None = None,
        alibi_slopes: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        dropout_p: float | None = None,
        seed: int | torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        block_table: torch.Tensor | None = None,
        leftpad_k: torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        num_splits: int | None = None,
        return_lse: Literal[False] = False,
        _poison: bool = False,
        **values_of_mods: Any,
    ) -> torch.Tensor: ...

    @overload
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        window: tuple[int, int] | None = None,
        alibi_slopes: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        dropout_p: float | None = None,
        seed: int | torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        block_table: torch.Tensor | None = None,
        leftpad_k: torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        num_splits: int | None = None,
        return_lse: Literal[True],
        _poison: bool = False,
        **values_of_mods: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        window: tuple[int, int] | None = None,
        alibi_slopes: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        sink: torch.Tensor | None = None,
        dropout_p: float | None = None,
        seed: int | torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        block_table: torch.Tensor | None = None,
        leftpad_k: torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        num_splits: int | None = None,
        return_lse: bool = False,
        _poison: bool = False,
        **values_of_mods: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """o = softmax(modified scores) v, as SEMANTICS defines it.

        q: (B, Sq, Hq, D), k: (B, Sk, Hk, D), v: (B, Sk, Hk, Dv) in the spec's dtype, on one device, any strides with a
        contiguous last dimension. Tensors whose rows are not 16-byte aligned are copied first. Under autocast they are
        cast to the spec's dtype.
        softmax_scale: default D ** -0.5.
        softcap: the cap, with spec.softcap.
        window: (left, right) keys beside a query's own position, -1 for no bound, with spec.window.
        alibi_slopes: float32 (Hq,) or (B, Hq), with spec.alibi.
        bias: with spec.bias, added to the scores after the cap and the slopes: float32 or the spec's dtype, of any
        strides, broadcasts to (B, Hq, Sq, Sk); -inf hides a key from a query. Or bool, False where a key is hidden.
        sink: with spec.sink, (Hq,), float32 or 16 bits: one more score for each row of a head, whose key has no value.
        It is in lse; a row that sees nothing else has o = 0 and its sink as lse.
        dropout_p: probability in [0, 1), with spec.dropout; seed: an integer that fixes the mask, or int64 (2,) on the
        device, (seed, offset), else PyTorch's generator of the device draws both: under a captured CUDA graph anew at
        each replay.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1,), with spec.varlen, for packed sequences: q (Tq, Hq, D), k and v
        (Tk, Hk, ...). Sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q and likewise of k and v; rows of
        no sequence are left out, and those of o and lse are not written. Nothing is read back to the host.
        seqused_k: int32 (B,), with spec.varlen or spec.split_kv: how many keys of each sequence count, the first ones,
        no more than there are; default all.
        max_seqlen_q, max_seqlen_k: lengths that no sequence exceeds; without them Tq and Tk, which costs time.
        block_table: int32 (B, pages), with spec.paged: k and v are then (pages of all, size of a page, Hk, ...), the
        size a power of two from 16 on, and the keys of entry b from i * size on lie in page block_table[b, i]. Entries
        and slots that seqused_k does not reach may hold anything.
        leftpad_k: int32 (B,), with spec.split_kv: the first key that counts of each entry; seqused_k counts those
        before it too. Default 0. cache_batch_idx: int32 (B,), with spec.split_kv and contiguous k and v: which entry of
        k and v each entry of q has; default its own. No check reads the numbers.
        num_splits: with spec.split_kv, into how many parts the keys are split, 1 to 128; default what keeps the card
        busy.
        values_of_mods: by its argument, the value of any other score modification that the spec has.

        Returns o (B, Sq, Hq, Dv), with return_lse also lse (B, Hq, Sq) float32, natural logarithm, of the undropped
        scores; packed, (Tq, Hq, Dv) and (Hq, Tq). -inf and o = 0 for a row that sees nothing. With spec.backward both
        have gradients in q, k, v, bias and sink, those that need one; not in alibi_slopes, and no second derivatives.
        That of bias, in its shape and dtype, takes a float32 sum of that shape; with spec.deterministic of
        (B, Hq, Sq, Sk).

        Raises SpecError for tensors or values that do not fit the spec, a value for a feature that it lacks, and a
        feature without its value; LaunchError where the launch fails.
        """
        if bias is not None:
            values_of_mods["bias"] = bias
        if sink is not None:
            values_of_mods["sink"] = (
                sink.float() if isinstance(sink, torch.Tensor) and sink.is_floating_point() else sink
            )
        if torch.compiler.is_compiling() or not _is_plain(q, k, v):
            if _poison:
                raise SpecError("_poison is for plain tensors in eager mode")
            return self._through_operators(
                *(q, k, v, softmax_scale, softcap, window, alibi_slopes, dropout_p, seed),
                self._packed(
                    cu_seqlens_q,
                    cu_seqlens_k,
                    seqused_k,
                    max_seqlen_q,
                    max_seqlen_k,
                    block_table,
                    leftpad_k,
                    cache_batch_idx,
                ),
                num_splits,
                return_lse,
                values_of_mods,
            )
        if torch._C._is_any_autocast_enabled():
            q, k, v = self._autocast(q, k, v)
        # As little as possible where the last call was like this one: this is the host's time of a call. The shape lets
        # calls of several shapes take turns.
        values: tuple[Any, ...] = (k.shape, softmax_scale, window, dropout_p, softcap)
        mods: tuple[Any, ...] | None = None
        packed: Packed | None = None
        tensors: tuple[torch.Tensor, ...] = ()
        if alibi_slopes is not None or values_of_mods:
            mods = self._mods(softcap, alibi_slopes, values_of_mods)
            tensors = tuple([value for value in mods if isinstance(value, torch.Tensor)])
            values += tuple([None if isinstance(value, torch.Tensor) else value for value in mods])
        if (
            self._varlen
            or cu_seqlens_q is not None
            or cu_seqlens_k is not None
            or seqused_k is not None
            or max_seqlen_q is not None
            or max_seqlen_k is not None
            or block_table is not None
            or leftpad_k is not None
            or cache_batch_idx is not None
        ):
            packed = self._packed(
                cu_seqlens_q,
                cu_seqlens_k,
                seqused_k,
                max_seqlen_q,
                max_seqlen_k,
                block_table,
                leftpad_k,
                cache_batch_idx,
            )
            if packed is not None:
                tensors += tuple([tensor for tensor in packed.tensors if isinstance(tensor, torch.Tensor)])
                values += (*[tensor is None for tensor in packed.tensors], max_seqlen_q, max_seqlen_k)
        if num_splits is not None:
            values += (num_splits, num_splits.__class__)  # True == 1, but is no number of parts
        call = self._recent.find(values, q, k, v, *tensors)
        if call is None:
            key = (*map(_described, (q, k, v, *tensors)), *values)
            try:
                call = self._calls.get(key)
            except TypeError:  # a value that cannot be hashed: the checks say what it should have been
                call = None
            if call is None:
                if mods is None:
                    mods = self._mods(softcap, alibi_slopes, values_of_mods)
                call = self._prepare(key, q, k, v, Values(softmax_scale, window, dropout_p, mods, packed, num_splits))
            self._recent.note(call, values, q, k, v, *tensors)
        if not call.aligned or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            q, k, v = aligned("q", q), aligned("k", k), aligned("v", v)
            call = self._lookup(q, k, v, call.values.with_tensors(tensors))
        state = None
        if self._dropout:
            state = philox_state(seed, call.device)
        elif seed is not None:
            check_given("dropout", "seed", False, seed)
        if forward_ad._current_level >= 0 or (
            torch.is_grad_enabled()
            and (q.requires_grad or k.requires_grad or v.requires_grad or (tensors and _requires_grad(tensors)))
        ):
            self._check_differentiable()
            result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
            result = _apply(self, call, return_lse, _poison, q, k, v, state, *tensors)
            return result
        o, lse, _ = call.forward(q, k, v, tensors, state, _poison, return_lse, False)
        return o if lse is None else (o, lse)

    def _mods(
        self, softcap: float | None, alibi_slopes: torch.Tensor | None, others: dict[str, Any]
    ) -> tuple[Any, ...]:
        """The values of the spec's modifications, in its order."""
        given = {"softcap": softcap, "alibi_slopes": alibi_slopes, **others}
        for name, argument in self._unwanted:
            check_given(name, argument, False, given.pop(argument, None))
        for name, argument in self._wanted:
            check_given(name, argument, True, given.get(argument))
        mods = tuple(given.pop(argument) for _, argument in self._wanted)
        if given:
            fields = [name for name in given if name in AttentionSpec.model_fields]
            hint = f"; the spec says that: AttentionSpec(..., {fields[0]}=...)" if fields else ""
            raise SpecError(f"a call takes no argument {', '.join(given)}{hint}")
        if torch.is_grad_enabled():
            for (_, argument), value in zip(self._wanted, mods, strict=True):
                if argument in self._without_gradient and isinstance(value, torch.Tensor) and value.requires_grad:
                    raise SpecError(
                        f"{argument} requires a gradient, which {self._without_gradient[argument]}: "
                        f"pass {argument}.detach()"
                    )
        return mods

    def _packed(
        self,
        cu_seqlens_q: torch.Tensor | None,
        cu_seqlens_k: torch.Tensor | None,
        seqused_k: torch.Tensor | None,
        max_seqlen_q: int | None,
        max_seqlen_k: int | None,
        block_table: torch.Tensor | None,
        leftpad_k: torch.Tensor | None,
        cache_batch_idx: torch.Tensor | None,
    ) -> Packed | None:
        """Where packed sequences lie or which keys count; None where nothing says so."""
        check_given("paged", "block_table", self.spec.paged, block_table)
        check_given("varlen", "cu_seqlens_q", self._varlen, cu_seqlens_q)
        check_given("varlen", "cu_seqlens_k", self._varlen, cu_seqlens_k)
        if not self.spec.split_kv:
            check_given("split_kv", "leftpad_k", False, leftpad_k)
            check_given("split_kv", "cache_batch_idx", False, cache_batch_idx)
        if self._varlen:
            return Packed((cu_seqlens_q, cu_seqlens_k, seqused_k, block_table), max_seqlen_q, max_seqlen_k)
        check_given("varlen", "max_seqlen_q", False, max_seqlen_q)
        check_given("varlen", "max_seqlen_k", False, max_seqlen_k)
        if not self.spec.split_kv:
            check_given("varlen", "seqused_k", False, seqused_k)
            return None
        if self.spec.paged:
            check_given("paged", "seqused_k", True, seqused_k)
            check_one_place(cache_batch_idx, block_table)
        tensors = (seqused_k, block_table, leftpad_k, cache_batch_idx)
        return None if all(tensor is None for tensor in tensors) else Packed(tensors, None, None)

    def _autocast(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The three in the spec's dtype where autocast is on for their device, float64 excepted as in PyTorch."""
        if not torch.is_autocast_enabled(q.device.type):
            return q, k, v
        q, k, v = (x.to(self._dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
        return q, k, v

    def _check_differentiable(self) -> None:
        if not self._backward:
            raise SpecError(
                "an input requires a gradient, and the kernel computes none: "
                "AttentionSpec(..., backward=True), or call under torch.no_grad()"
            )

    def _check_device(self, device: torch.device) -> None:
        if device.type == "cpu" and self.emulate is False:
            raise SpecError("the tensors are on the CPU and emulate=False; move them to a GPU, or leave emulate out")
        if device.type not in ("cpu", "cuda"):
            raise SpecError(f"the tensors are on {device}; fagen runs on CUDA devices, and emulated on the CPU")
        if device.type == "cuda" and self.emulate:
            raise SpecError(f"the tensors are on {device} and emulate=True; move them to the CPU, or leave emulate out")

    def _through_operators(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None,
        softcap: float | None,
        window: tuple[int, int] | None,
        alibi_slopes: torch.Tensor | None,
        dropout_p: float | None,
        seed: int | torch.Tensor | None,
        packed: Packed | None,
        num_splits: int | None,
        return_lse: bool,
        others: dict[str, Any],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`__call__` by way of torch.library: where PyTorch traces, or a mode or a subclass of Tensor looks on."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise SpecError(f"{name} must be a tensor, got {type(x).__name__}")
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            raise SpecError(
                "attention has no rules for the transforms of torch.func: call it outside vmap, grad and jvp"
            )
        if q.device.type != "meta":
            self._check_device(q.device)
            q, k, v = self._autocast(q, k, v)
        mods = self._mods(softcap, alibi_slopes, others)
        mod_tensors = [value for value in mods if isinstance(value, torch.Tensor)]
        if torch.is_grad_enabled() and _requires_grad((q, k, v, *mod_tensors)):
            self._check_differentiable()
        state = philox_state(seed, q.device) if self._dropout else None
        if state is None:
            check_given("dropout", "seed", False, seed)
        spec, arch = self._identity
        o, lse, _ = torch.ops.fagen.forward(
            q,
            k,
            v,
            spec,
            arch,
            softmax_scale,
            window,
            dropout_p,
            mod_tensors,
            [value for value in mods if not isinstance(value, torch.Tensor)],
            [isinstance(value, torch.Tensor) for value in mods],
            [] if packed is None else list(packed.tensors),
            None if packed is None else packed.max_seqlen_q,
            None if packed is None else packed.max_seqlen_k,
            num_splits,
            state,
        )
        return (o, lse) if return_lse else o

    def _prepare(self, key: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, values: Values) -> Call:
        self._check_device(q.device)
        call = Call(self.spec, self.kernels, q, k, v, values)
        if call.cacheable:
            if len(self._calls) >= MOST:
                self._calls.clear()
            with suppress(TypeError):  # a list where a tuple should be
                self._calls[key] = call
        return call

    def _lookup(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, values: Values) -> Call:
        """The prepared call for such tensors and values."""
        key = (*map(_described, (q, k, v, *values.mods)), values.softmax_scale, values.window, values.dropout_p)
        key += (values.num_splits,)
        if values.packed is not None:
            key += (*map(_described, values.packed.tensors), values.packed.max_seqlen_q, values.packed.max_seqlen_k)
        try:
            call = self._calls.get(key)
        except TypeError:
            call = None
        return self._prepare(key, q, k, v, values) if call is None else call

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, values: Values, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(o, lse, stats), without autograd; stats with spec.backward only."""
        q, k, v = aligned("q", q), aligned("k", k), aligned("v", v)
        o, lse, stats = self._lookup(q, k, v, values).forward(q, k, v, values.tensors(), state, False, traced=True)
        assert lse is not None
        return o, lse, stats

    def _gradients(
        self,
        needed: Sequence[bool],
        d_o: torch.Tensor | None,
        d_lse: torch.Tensor | None,
        saved: Saved,
        values: Values,
        state: torch.Tensor | None,
        poison: bool = False,
    ) -> Gradients:
        """What `Call.gradients` gives, of tensors that need not be aligned."""
        q, k, v = aligned("q", saved.q), aligned("k", saved.k), aligned("v", saved.v)
        call = self._lookup(q, k, v, values)
        return call.gradients(needed, d_o, d_lse, saved._replace(q=q, k=k, v=v), values.tensors(), state, poison)


class PlannedAttention(Attention):
    """An attention whose kernels are given, for plain calls on one device."""

    def __init__(self, spec: AttentionSpec, plans: Sequence[KernelPlan], device: torch.device) -> None:
        emulate = device.type == "cpu"
        super().__init__(spec, arch=plans[0].arch.name, emulate=emulate)
        self._kernels[device] = kernels.load_planned(plans, None if emulate else device.index)


def _restored(spec: AttentionSpec, arch: str | None, emulate: bool | None) -> Attention:
    return Attention(spec, arch=arch, emulate=emulate)


class _Attention(torch.autograd.Function):
    """Autograd in eager mode, without the time that a way through torch.library would take."""

    @staticmethod
    def forward(
        ctx: Any,
        attention: Attention,
        call: Call,
        return_lse: bool,
        poison: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        o, lse, stats = call.forward(q, k, v, tensors, state, poison, return_lse or call.saves_lse)
        ctx.of_call = attention, call, poison
        ctx.save_for_backward(q, k, v, o, stats, lse if call.saves_lse else None, state, *tensors)
        ctx.set_materialize_grads(False)
        return (o, lse) if return_lse and lse is not None else o

    @staticmethod
    def backward(ctx: Any, d_o: torch.Tensor | None, d_lse: torch.Tensor | None = None) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[4:7] + ctx.needs_input_grad[8:]
        q, k, v, o, stats, lse, state, *tensors = ctx.saved_tensors
        gradients: Gradients = (None,) * len(needed)
        if d_o is not None or d_lse is not None:
            backward = _Once.apply if torch.is_grad_enabled() else _backward
            gradients = backward(ctx, needed, state, tensors, d_o, d_lse, q, k, v, o, stats, lse)
        return (None, None, None, None, *gradients[:3], None, *gradients[3:])


# torch.autograd.Function.apply but for its look for transforms of torch.func, of which `_is_plain` has found none.
_apply: Callable[..., Any] = super(torch.autograd.Function, _Attention).apply


def _backward(
    ctx: Any,
    needed: Sequence[bool],
    state: torch.Tensor | None,
    tensors: Sequence[torch.Tensor],
    d_o: torch.Tensor | None,
    d_lse: torch.Tensor | None,
    *inputs: Any,
) -> Gradients:
    attention: Attention
    call: Call
    attention, call, poison = ctx.of_call
    saved = Saved(*inputs)
    if call.fits(saved.q, saved.k, saved.v, *tensors):
        return call.gradients(needed, d_o, d_lse, saved, tensors, state, poison)
    # A hook on saved tensors has brought back others of the same values.
    return attention._gradients(needed, d_o, d_lse, saved, call.values.with_tensors(tensors), state, poison)


class _Once(torch.autograd.Function):
    """The backward where it is to be differentiated too: the gradients, and an error behind them."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Gradients:
        return _backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        raise SpecError(SECOND_DERIVATIVE)


def _requires_grad(tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def _is_plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Nothing needs to see the operators: no subclass, no mode, no transform, no tensor without storage."""
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not q.is_meta
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _described(value: Any) -> Any:
    """What of a value of a modification decides how a call is prepared."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


@cache  # one notice a process
def _warn_of_fallback(name: str) -> None:
    log.warning("no GPU found, and neither arch=, FAGEN_ARCH nor TORCH_CUDA_ARCH_LIST is set: building for %s", name)


def default_arch(index: int | None) -> Arch:
    """What kernels are built for where nothing is said: for this card, or emulated (None)."""
    if index is not None:
        return for_capability(torch.cuda.get_device_capability(index))
    archs, source = target.default_archs()
    if not source:
        _warn_of_fallback(archs[0].name)
    return archs[0]
