"""`fagen.load` and the callable it returns: from tensors to launches, and gradients."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any, Literal, overload

import torch
from torch.autograd import forward_ad

from fagen import kernels, target
from fagen.arch import Arch, for_capability, resolve
from fagen.cache import Artifact
from fagen.call import (
    ALIGNMENT,
    DTYPES,
    Scalars,
    Sizes,
    Values,
    aligned,
    check_given,
    check_tensors,
    philox_state,
    rows_aligned,
    scalars,
    stats_shape,
    strides,
    strides_by_head,
)
from fagen.errors import LaunchError, SpecError
from fagen.kernels import Kernel, Launch
from fagen.mods import MODS
from fagen.operators import SECOND_DERIVATIVE
from fagen.plan import KernelPlan
from fagen.spec import AttentionSpec

log = logging.getLogger("fagen")

_MOST_CALLS = 256  # prepared calls that an Attention keeps


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
        self.spec = spec
        self.emulate = emulate
        self._arch = None if arch is None else resolve(arch)
        self._kernels: dict[torch.device, dict[str, Kernel]] = {}
        self._calls: dict[Any, _Call] = {}
        # What a call needs of the spec, where pydantic's and properties' time would count, and torch.compile looks.
        self._identity = (spec.model_dump_json(), arch or "")
        self._dtype = DTYPES[spec.dtype]
        self._wanted = tuple((mod.name, mod.argument) for mod in spec.mods)
        self._unwanted = tuple((mod.name, mod.argument) for mod in MODS if mod not in spec.mods)
        self._backward = spec.backward
        self._dropout = spec.dropout

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
            if device.type == "cpu":
                self._kernels[device] = kernels.load(self.spec, self._arch or _default_arch(), None)
            else:
                index = torch.cuda.current_device() if device.index is None else device.index
                arch = self._arch or for_capability(torch.cuda.get_device_capability(index))
                self._kernels[device] = kernels.load(self.spec, arch, index)
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
        dropout_p: float | None = None,
        seed: int | torch.Tensor | None = None,
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
        dropout_p: float | None = None,
        seed: int | torch.Tensor | None = None,
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
        dropout_p: float | None = None,
        seed: int | torch.Tensor | None = None,
        return_lse: bool = False,
        _poison: bool = False,
        **values_of_mods: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """o = softmax(modified scores) v, as SEMANTICS defines it.

        q: (B, Sq, Hq, D), k: (B, Sk, Hk, D), v: (B, Sk, Hk, Dv) in the spec's dtype, on one device, any strides with a
        contiguous last dimension. Tensors whose rows are not 16-byte aligned are copied first.
        softmax_scale: default D ** -0.5.
        softcap: the cap, with spec.softcap.
        window: (left, right) keys beside a query's own position, -1 for no bound, with spec.window.
        alibi_slopes: float32 (Hq,) or (B, Hq), with spec.alibi.
        dropout_p: probability in [0, 1), with spec.dropout; seed: an integer that fixes the mask, else PyTorch's
        generator of the device draws one.
        values_of_mods: by its argument, the value of any other score modification that the spec has.

        Returns o (B, Sq, Hq, Dv), with return_lse also lse (B, Hq, Sq) float32, natural logarithm, of the undropped
        scores; -inf and o = 0 for a row that sees nothing.

        Raises SpecError for tensors or values that do not fit the spec, a value for a feature that it lacks, and a
        feature without its value; LaunchError where the launch fails.
        """
        if torch.compiler.is_compiling() or not _is_plain(q, k, v):
            if _poison:
                raise SpecError("_poison is for plain tensors in eager mode")
            return self._through_operators(
                q, k, v, softmax_scale, softcap, window, alibi_slopes, dropout_p, seed, return_lse, values_of_mods
            )
        if torch._C._is_any_autocast_enabled():
            q, k, v = self._autocast(q, k, v)
        if softcap is None and alibi_slopes is None and not values_of_mods and not self._wanted:
            mods: tuple[Any, ...] = ()
        else:
            mods = self._mods(softcap, alibi_slopes, values_of_mods)
        values = Values(softmax_scale, window, dropout_p, mods)
        call = self._call(q, k, v, values)
        state = philox_state(seed, call.device) if self._dropout else None
        if seed is not None and state is None:
            check_given("dropout", "seed", False, seed)
        if forward_ad._current_level >= 0 or (
            torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        ):
            self._check_differentiable()
            return _Attention.apply(self, values, state, return_lse, _poison, q, k, v)  # type: ignore[no-any-return]
        o, lse, _ = call.forward(q, k, v, mods, state, _poison)
        return (o, lse) if return_lse else o

    def _mods(self, softcap: float | None, alibi_slopes: torch.Tensor | None, others: dict[str, Any]) -> tuple[Any, ...]:
        """The values of the spec's modifications, in its order."""
        given = {"softcap": softcap, "alibi_slopes": alibi_slopes, **others}
        for name, argument in self._unwanted:
            check_given(name, argument, False, given.pop(argument, None))
        for name, argument in self._wanted:
            check_given(name, argument, True, given.get(argument))
        mods = tuple(given.pop(argument) for _, argument in self._wanted)
        if given:
            raise SpecError(f"a call takes no argument {', '.join(given)}")
        if torch.is_grad_enabled():
            for (_, argument), value in zip(self._wanted, mods, strict=True):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise SpecError(
                        f"{argument} requires a gradient, which no kernel computes: pass {argument}.detach()"
                    )
        return mods

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
        return_lse: bool,
        others: dict[str, Any],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`__call__` by way of torch.library: where PyTorch traces, or a mode or a subclass of Tensor looks on."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise SpecError(f"{name} must be a tensor, got {type(x).__name__}")
        if q.device.type != "meta":
            self._check_device(q.device)
            q, k, v = self._autocast(q, k, v)
        mods = self._mods(softcap, alibi_slopes, others)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
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
            [value if isinstance(value, torch.Tensor) else None for value in mods],
            [0.0 if isinstance(value, torch.Tensor) else value for value in mods],
            state,
        )
        return (o, lse) if return_lse else o

    def _call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, values: Values) -> _Call:
        """The prepared call for such tensors and values."""
        key = (q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device)
        key += (v.shape, v.stride(), v.dtype, v.device, values)  # type: ignore[assignment]
        if values.mods:
            mods = tuple(_described(value) for value in values.mods)
            key = (*key[:-1], values._replace(mods=mods))  # type: ignore[assignment]
        try:
            call = self._calls.get(key)
        except TypeError:  # a value that cannot be hashed: the checks say what it should have been
            return _Call(self, q, k, v, values)
        if call is None:
            call = _Call(self, q, k, v, values)
            if not call.scalars.made:
                if len(self._calls) >= _MOST_CALLS:
                    self._calls.clear()
                self._calls[key] = call
        return call

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, values: Values, state: torch.Tensor | None, poison: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(o, lse, stats) of checked values; stats with spec.backward only."""
        return self._call(q, k, v, values).forward(q, k, v, values.mods, state, poison)

    def _gradients(
        self,
        d_o: torch.Tensor | None,
        d_lse: torch.Tensor | None,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        values: Values,
        state: torch.Tensor | None,
        needed: tuple[bool, bool, bool],
        poison: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(dq, dk, dv), each None unless needed. `saved` is (q, k, v, o, stats)."""
        q, k, v, o, stats = saved
        q, k, v = aligned("q", q), aligned("k", k), aligned("v", v)
        if d_o is None:
            d_o = o.new_zeros(o.shape[3]).expand(o.shape)
        d_o = aligned("do", d_o)
        call = self._call(q, k, v, values)
        return call.gradients(needed, d_o, d_lse, q, k, v, o, stats, values.mods, state, poison)


class _Call:
    """A forward for tensors of certain sizes and strides: what is left is to allocate and to launch.

    Raises SpecError for tensors or values that do not fit.
    """

    def __init__(
        self, attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, values: Values
    ) -> None:
        spec = attention.spec
        self.attention = attention
        self.sizes = sizes = check_tensors(spec, q, k, v)
        self.device = q.device
        self.scalars = scalars(spec, sizes, values, q.device)
        attention._check_device(q.device)
        self._values = values._replace(mods=())
        self._o_shape = (sizes.batch, sizes.seqlen_q, sizes.heads_q, spec.dim_v)
        self._lse_shape = (sizes.batch, sizes.heads_q, sizes.seqlen_q)
        self._stats_shape = stats_shape(sizes) if spec.backward else None
        self._dtype = q.dtype
        self._aligned = rows_aligned(q) and rows_aligned(k) and rows_aligned(v)
        self._extra_names = (*self.scalars.tensors, *self.scalars.made, *(["philox_state"] if spec.dropout else []))
        self._fields = {
            **self.scalars.fields,
            **strides("q", q),
            **strides("k", k),
            **strides("v", v),
            "seqlen_q": sizes.seqlen_q,
            "seqlen_k": sizes.seqlen_k,
            "heads_q": sizes.heads_q,
            "heads_k": sizes.heads_k,
            "group_size": sizes.heads_q // sizes.heads_k,
        }
        self._launch = None if sizes.empty or not self._aligned else self._forward_launch()
        self._gradients: dict[Any, _Gradients] = {}

    def _forward_launch(self) -> Launch:
        kernel = self.attention.kernels(self.device)["fwd"]
        sizes = self.sizes
        o = torch.empty(self._o_shape, dtype=self._dtype, device="meta")
        return Launch(
            kernel,
            sizes.batch * sizes.heads_q * -(-sizes.seqlen_q // kernel.plan.tile.tile_m),
            self._fields | strides("o", o),
            ("q", "k", "v", "o", "lse", *(["stats"] if self._stats_shape else []), *self._extra_names),
        )

    def _extras(self, mods: tuple[Any, ...], state: torch.Tensor | None) -> list[torch.Tensor]:
        """The tensors of `_extra_names`."""
        extras = [mods[index] for index in self.scalars.tensors.values()]
        extras += self.scalars.made.values()
        if state is not None:
            extras.append(state)
        return extras

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mods: tuple[Any, ...],
        state: torch.Tensor | None,
        poison: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(o, lse, stats). Tensors whose rows are not aligned are copied."""
        device = self.device
        launch = self._launch
        if launch is not None and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            o = torch.empty(self._o_shape, dtype=self._dtype, device=device)
            lse = torch.empty(self._lse_shape, dtype=torch.float32, device=device)
            outputs = [o, lse]
            if self._stats_shape is not None:
                outputs.append(torch.empty(self._stats_shape, dtype=torch.float32, device=device))
            if poison:
                for output in outputs:
                    output.fill_(math.nan)
            if self._extra_names:
                launch(q, k, v, *outputs, *self._extras(mods, state))
            else:
                launch(q, k, v, *outputs)
            return o, lse, outputs[2] if self._stats_shape is not None else None
        if self.sizes.empty:
            stats = None if self._stats_shape is None else torch.empty(self._stats_shape, device=device)
            o = torch.empty(self._o_shape, dtype=self._dtype, device=device)
            return o, torch.empty(self._lse_shape, device=device), stats
        q, k, v = aligned("q", q), aligned("k", k), aligned("v", v)
        return self.attention._forward(q, k, v, self._values._replace(mods=mods), state, poison)

    def gradients(
        self,
        needed: tuple[bool, bool, bool],
        d_o: torch.Tensor,
        d_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        stats: torch.Tensor,
        mods: tuple[Any, ...],
        state: torch.Tensor | None,
        poison: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(dq, dk, dv), each None unless needed. The rows of all tensors are aligned."""
        if self.sizes.empty or self.sizes.seqlen_k == 0:
            dq, dk, dv = (x.new_zeros(x.shape) if need else None for x, need in zip((q, k, v), needed, strict=True))
            return dq, dk, dv
        key = (needed, d_o.stride(), None if d_lse is None else d_lse.stride())
        gradients = self._gradients.get(key)
        if gradients is None:
            kernels = self.attention.kernels(self.device)
            fields = self._fields | strides("o", o) | strides("d_o", d_o) | strides_by_head("d_lse", d_lse)
            gradients = _Gradients(kernels, self.sizes, fields, self._extra_names, (q, k, v), needed)
            if len(self._gradients) >= _MOST_CALLS:
                self._gradients.clear()
            self._gradients[key] = gradients
        return gradients(d_o, d_lse, q, k, v, o, stats, self._extras(mods, state), poison)


class _Gradients:
    """The backward of a `_Call` for gradients of certain strides: what is left is to allocate and to launch."""

    def __init__(
        self,
        kernels: dict[str, Kernel],
        sizes: Sizes,
        fields: dict[str, Any],
        extra_names: tuple[str, ...],
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        needed: tuple[bool, bool, bool],
    ) -> None:
        self._needed = needed
        for name, x in zip(("d_q", "d_k", "d_v"), inputs, strict=True):
            fields = fields | strides(name, torch.empty(x.shape, dtype=x.dtype, device="meta"))
        heads = sizes.batch * sizes.heads_q

        def query_tiles(kind: str) -> int:
            return heads * -(-sizes.seqlen_q // kernels[kind].plan.tile.tile_m)

        self._delta_shape = stats_shape(sizes)[:3]
        # dV does without delta: what the kernel makes of its unwritten memory is dropped with dS.
        self._delta: Launch | None = None
        if needed[0] or needed[1]:
            rows = kernels["bwd_delta"].plan.threads // 8
            grid = heads * self._delta_shape[2] // rows
            self._delta = Launch(kernels["bwd_delta"], grid, fields, ("o", "d_o", "d_lse", "delta"))
        inner = ("q", "k", "v", "d_o", "stats", "delta")
        deterministic = "bwd_dq" in kernels
        self._dq: Launch | None = None
        self._convert: Launch | None = None
        self._dq_sum_floats = 0
        if needed[0] and deterministic:
            self._dq = Launch(kernels["bwd_dq"], query_tiles("bwd_dq"), fields, (*inner, "d_q", *extra_names))
        elif needed[0]:
            self._dq_sum_floats = query_tiles("bwd") * kernels["bwd"].plan.dq_tile_floats
            self._convert = Launch(kernels["bwd_convert"], query_tiles("bwd"), fields, ("dq_sum", "d_q"))
        self._main: Launch | None = None
        self._sums = not deterministic
        if needed[1] or needed[2] or not deterministic:
            grid = sizes.batch * sizes.heads_k * -(-sizes.seqlen_k // kernels["bwd"].plan.tile.tile_n)
            sums = ["dq_sum"] if self._sums else []
            self._main = Launch(kernels["bwd"], grid, fields, (*inner, "d_k", "d_v", *sums, *extra_names))

    def __call__(
        self,
        d_o: torch.Tensor,
        d_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        stats: torch.Tensor,
        extras: list[torch.Tensor],
        poison: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        device = q.device
        need_q, need_k, need_v = self._needed
        dq = torch.empty(q.shape, dtype=q.dtype, device=device) if need_q else None
        dk = torch.empty(k.shape, dtype=k.dtype, device=device) if need_k else None
        dv = torch.empty(v.shape, dtype=v.dtype, device=device) if need_v else None
        delta = torch.empty(self._delta_shape, dtype=torch.float32, device=device)
        if poison:
            for output in (dq, dk, dv, delta):
                if output is not None:
                    output.fill_(math.nan)
        dq_sum = None
        if self._dq_sum_floats:
            dq_sum = torch.zeros(self._dq_sum_floats, dtype=torch.float32, device=device)
        if self._delta is not None:
            self._delta(o, d_o, d_lse, delta)
        if self._main is not None:
            sums = [dq_sum] if self._sums else []
            self._main(q, k, v, d_o, stats, delta, dk, dv, *sums, *extras)
        if self._convert is not None:
            self._convert(dq_sum, dq)
        if self._dq is not None:
            self._dq(q, k, v, d_o, stats, delta, dq, *extras)
        return dq, dk, dv


class _Attention(torch.autograd.Function):
    """Autograd in eager mode, without the time that a way through torch.library would take."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        attention: Attention,
        values: Values,
        state: torch.Tensor | None,
        return_lse: bool,
        poison: bool,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        o, lse, stats = attention._forward(q, k, v, values, state, poison)
        ctx.attention, ctx.poison = attention, poison
        ctx.values = values
        tensors = [value for value in values.mods if isinstance(value, torch.Tensor)]
        if tensors:
            ctx.values = values._replace(
                mods=tuple(None if isinstance(value, torch.Tensor) else value for value in values.mods)
            )
        ctx.save_for_backward(q, k, v, o, stats, state, *tensors)
        ctx.set_materialize_grads(False)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx: Any, d_o: torch.Tensor | None, d_lse: torch.Tensor | None = None) -> tuple[Any, ...]:  # type: ignore[override]
        none = (None,) * 5
        needed = ctx.needs_input_grad[5:]
        if d_o is None and d_lse is None:
            return (*none, None, None, None)
        q, k, v, o, stats, state, *tensors = ctx.saved_tensors
        values = ctx.values
        if tensors:
            rest = iter(tensors)
            values = values._replace(mods=tuple(next(rest) if value is None else value for value in values.mods))
        if torch.is_grad_enabled():
            return (*none, *_Once.apply(ctx.attention, needed, values, state, ctx.poison, d_o, d_lse, q, k, v, o, stats))
        saved = (q, k, v, o, stats)
        return (*none, *ctx.attention._gradients(d_o, d_lse, saved, values, state, needed, ctx.poison))


class _Once(torch.autograd.Function):
    """The backward where it is to be differentiated too: the gradients, and an error behind them."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        attention: Attention,
        needed: tuple[bool, bool, bool],
        values: Values,
        state: torch.Tensor | None,
        poison: bool,
        d_o: torch.Tensor | None,
        d_lse: torch.Tensor | None,
        *saved: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        q, k, v, o, stats = saved
        return attention._gradients(d_o, d_lse, (q, k, v, o, stats), values, state, needed, poison)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        raise SpecError(SECOND_DERIVATIVE)


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
    log.warning("no GPU and no FAGEN_ARCH: building for %s", name)


def _default_arch() -> Arch:
    archs, source = target.default_archs()
    if not source:
        _warn_of_fallback(archs[0].name)
    return archs[0]
