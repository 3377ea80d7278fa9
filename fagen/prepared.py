"""Calls checked and packed once for all of their sizes, strides and values: what is left is to allocate and launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from fagen.arch.tiles import BackwardTile, HopperBackwardTile, HopperTile, LinearTile, TileConfig
from fagen.call import (
    ALIGNMENT,
    STATS_ROWS,
    Sizes,
    ValueGradient,
    Values,
    aligned,
    check_tensors,
    lse_shape,
    named,
    packed_tiles,
    rows_aligned,
    scalars,
    stats_shape,
    strides,
    strides_by_head,
)
from fagen.errors import SpecError
from fagen.kernels import Kernel, Launch
from fagen.launch import current_stream
from fagen.plan import KernelPlan
from fagen.schedule import heads_a_group, splits
from fagen.spec import AttentionSpec
from fagen.tensor_map import TensorMap

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # not in every PyTorch to come: then `Recent` finds nothing
    TensorGuards = None  # type: ignore[assignment, misc]

MOST_ROWS = 2**31 - 1  # of calls with split_kv
MOST_DECODE_ROWS = 32  # query rows of a head of k and v up to which the kernel for few rows is the faster one
MOST = 256  # prepared calls that are kept, and backwards of each
_EMULATED_MULTIPROCESSORS = 3
_DELTA_LANES = 8  # threads that share a row in the kernel of delta

Gradients = tuple[torch.Tensor | None, ...]  # of q, k, v and the tensors of a call


class Saved(NamedTuple):
    """What the backward takes of the forward: its inputs and what it returned."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    stats: torch.Tensor
    lse: torch.Tensor | None = None  # for the gradient of a sink


class Call:
    """One kind of call of a spec. Any number of threads may run it at once.

    Raises SpecError for tensors or values that do not fit the spec.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        kernels: Callable[[torch.device], Mapping[str, Kernel]],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        values: Values,
    ) -> None:
        """`kernels` are those for a device by kind; `values` has the tensors of modifications, for their shapes."""
        sizes = self._sizes = check_tensors(spec, q, k, v, values.packed)
        given = scalars(spec, sizes, values, q.device)
        self.device = q.device
        self.values = values.without_tensors()
        self.cacheable = not given.made
        self.aligned = rows_aligned(q) and rows_aligned(k) and rows_aligned(v)
        self._strides = q.stride(), k.stride(), v.stride()
        self._kernels = kernels
        self._made = tuple(given.made.values())
        self._tensor_indices = tuple(given.tensors.values())
        self._tensor_strides = tuple(tensor.stride() for tensor in values.tensors())
        self._value_gradients = given.gradients
        self.saves_lse = spec.sink and spec.backward
        self._sink = given.tensors.get("sink")  # where it is among the tensors
        self._extra_names = (*given.tensors, *given.made, *(["philox_state"] if spec.dropout else []))
        self._dtype = q.dtype
        self._bounded = spec.causal or spec.window
        o = _contiguous((*q.shape[:-1], spec.dim_v))
        self._o_strides = o.stride()
        self._o_is_like_q = q.shape == o.shape and q.stride() == o.stride()
        self._new_o = _allocator(o.shape, q.dtype, q.device)
        self._new_lse = _allocator(lse_shape(spec, q), torch.float32, q.device)
        self._new_stats = _allocator(stats_shape(spec, sizes, q), torch.float32, q.device) if spec.backward else None
        self._fields = {
            **given.fields,
            **strides("q", q),
            **strides("k", k),
            **strides("v", v),
            **strides("o", o),
            "seqlen_q": sizes.seqlen_q,
            "seqlen_k": sizes.seqlen_k,
            "heads_q": sizes.heads_q,
            "heads_k": sizes.heads_k,
            "group_size": sizes.heads_q // sizes.heads_k,
        }
        if spec.paged:
            self._fields |= {
                "block_table_stride": named(spec, values.packed, "block_table").stride(0),
                "page_shift": k.shape[1].bit_length() - 1,
            }
        if spec.varlen:
            self._fields |= {"total_q": q.shape[0], "stats_rows": stats_shape(spec, sizes, q)[1]}
        # Tensors without elements may have the address 0, of which the copy engine reads nothing, not even zeros.
        self._launch: Launch | None = None
        self._counts_tiles = False  # a launch needs a zero where its blocks count the tiles that they take
        # The third is null of a call with its keys in one part, which has neither statistics nor partial results.
        self._three_outputs = spec.backward or spec.split_kv
        self._combine: Launch | None = None
        if not sizes.trivial:
            if spec.split_kv:
                self._launch, self._combine = self._split_launches(kernels(q.device), spec.dim_v)
            else:
                self._launch = self._forward_launch(kernels(q.device)["fwd"], q, k, v, o)
        self._backwards: dict[Any, _Backward] = {}

    def fits(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tensors: torch.Tensor) -> bool:
        """All lie in memory as those for which the call was prepared, and the three as the kernels want them."""
        return (
            self.aligned
            and not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT
            and (q.stride(), k.stride(), v.stride()) == self._strides
            and tuple([tensor.stride() for tensor in tensors]) == self._tensor_strides
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tensors: Sequence[torch.Tensor],
        state: torch.Tensor | None,
        poison: bool,
        want_lse: bool = True,
        want_stats: bool = True,
        traced: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(o, lse, stats) of tensors that fit; what is not wanted is None, as are stats without spec.backward.

        `tensors` are the values of modifications that are tensors, in order. `poison` fills what is returned with NaN
        before the launch. `traced`: the call is one of a compiled graph, which may be captured later.
        """
        o = torch.empty_like(q) if self._o_is_like_q else self._new_o()  # the first takes less time
        lse = self._new_lse() if want_lse else None
        stats = self._new_stats() if want_stats and self._new_stats is not None else None
        if poison:
            _poison(o, lse, stats)
        if self._combine is not None and self._launch is not None:
            o_partial, lse_partial = self._new_o_partial(), self._new_lse_partial()
            if poison:
                _poison(o_partial, lse_partial)
            self._launch(q, k, v, None, lse_partial, o_partial, *self._extras(tensors, state))
            self._combine(o_partial, lse_partial, o, lse)
        elif self._launch is not None:
            outputs: tuple[torch.Tensor | None, ...] = (o, lse, stats) if self._three_outputs else (o, lse)
            if self._counts_tiles:
                outputs += (zero_counter(self.device, own=traced),)
            if self._extra_names:
                self._launch(q, k, v, *outputs, *self._extras(tensors, state))
            else:
                self._launch(q, k, v, *outputs)
        else:
            o.zero_()
            if lse is not None:
                lse.fill_(-math.inf)
                if self._sink is not None:
                    lse.copy_(tensors[self._sink][:, None])
        return o, lse, stats

    def gradients(
        self,
        needed: Sequence[bool],
        d_o: torch.Tensor | None,
        d_lse: torch.Tensor | None,
        saved: Saved,
        tensors: Sequence[torch.Tensor],
        state: torch.Tensor | None,
        poison: bool,
    ) -> Gradients:
        """(dq, dk, dv, then of each of `tensors`), contiguous, each None unless needed, for q, k and v that fit.

        `d_o`, of any strides, or None: o was not used. `d_lse`, of any strides, or None: lse was not used.
        """
        q, k, v, o, stats, lse = saved
        if self._launch is None:
            inputs = zip((q, k, v, *tensors), needed, strict=True)
            zeros = [x.new_zeros(x.shape) if need else None for x, need in inputs]
            if self._sink is not None and needed[3 + self._sink] and d_lse is not None:
                zeros[3 + self._sink] = d_lse.sum(tuple(dim for dim in range(d_lse.dim()) if dim != d_lse.dim() - 2))
            return tuple(zeros)
        if d_o is None:
            d_o = o.new_zeros(o.shape[-1]).expand(o.shape)
        elif d_o.stride() != self._o_strides or d_o.data_ptr() % ALIGNMENT:
            d_o = aligned("do", d_o)
        o, stats = _dense(o), _dense(stats)
        key = (tuple(needed), d_o.stride(), None if d_lse is None else d_lse.stride())
        backward = self._backwards.get(key)
        if backward is None:
            if len(self._backwards) >= MOST:
                self._backwards.clear()
            fields = self._fields | strides("d_o", d_o) | strides_by_head("d_lse", d_lse, o.dim() - 1)
            backward = _Backward(
                *(self._kernels(self.device), self._sizes, fields, self._extra_names, self._value_gradients),
                *(self._sink, saved, d_o, needed),
            )
            self._backwards[key] = backward
        return backward(d_o, d_lse, Saved(q, k, v, o, stats, lse), tensors, self._extras(tensors, state), poison)

    def _forward_launch(
        self, kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor
    ) -> Launch:
        sizes = self._sizes
        tiles = _query_tiles(sizes, kernel)
        outputs = ["lse"] if self._new_stats is None else ["lse", "stats"]
        tile = kernel.plan.tile
        if not isinstance(tile, HopperTile):
            return Launch(kernel, tiles, self._fields, ("q", "k", "v", "o", *outputs, *self._extra_names))
        maps = _maps(q, {"q": (q, tile.tile_m), "k": (k, tile.tile_n), "v": (v, tile.tile_n), "o": (o, 64)})
        if kernel.plan.spec.varlen:
            tiles = packed_tiles(sizes, q, tile.tile_m) * sizes.heads_q  # no more than these
        if kernel.plan.counts_tiles:
            self._counts_tiles = True
            outputs.append("tiles_taken")
        blocks = min(tiles, multiprocessors(q.device))
        fields = self._fields | {"tiles": tiles, "batch": sizes.batch}
        if self._bounded:
            fields["heads_a_group"] = self._heads_a_group(tile, q.shape[-1] + v.shape[-1], blocks)
        return Launch(kernel, blocks, fields, (*maps, *outputs, *self._extra_names), maps)

    def _split_launches(self, kernels: Mapping[str, Kernel], dim_v: int) -> tuple[Launch, Launch | None]:
        """Those of the kernels where the keys may be split, and the memory between them. One part needs but the first,
        which then makes o itself."""
        sizes = self._sizes
        plans = {kind: kernel.plan for kind, kernel in kernels.items()}
        plan, tiles, parts = in_parts(plans, sizes, self.values.num_splits, self.device)
        forward = kernels[plan.kind]
        rows = sizes.batch * sizes.heads_q * sizes.seqlen_q
        if rows > MOST_ROWS:
            raise SpecError(
                f"{rows} rows of q over all batch entries and heads; at most {MOST_ROWS} are served at once"
            )
        fields = self._fields | {"splits": parts, "rows": rows}
        outputs = ("o", "lse", "o_partial")
        attend = Launch(forward, tiles * parts, fields, ("q", "k", "v", *outputs, *self._extra_names))
        if parts == 1:
            return attend, None
        self._new_o_partial = _allocator((parts, rows, dim_v), torch.float32, self.device)
        self._new_lse_partial = _allocator((parts, rows), torch.float32, self.device)
        return attend, Launch(kernels["combine"], rows, fields, ("o_partial", "lse_partial", "o", "lse"))

    def _heads_a_group(self, tile: HopperTile, columns: int, blocks: int) -> int:
        """How many query heads' tiles lie side by side; `columns`: of keys and values together."""
        sizes = self._sizes
        m_tiles = -(-sizes.seqlen_q // tile.tile_m)
        end = (torch.arange(m_tiles, 0, -1, device="cpu") * tile.tile_m).clamp(max=sizes.seqlen_q) + (
            sizes.seqlen_k - sizes.seqlen_q
        )
        begin = torch.zeros_like(end)
        if "window_left" in self._fields:
            begin = (end - tile.tile_m - self._fields["window_left"]).clamp(min=0)
            end = end + self._fields["window_right"]
        keys = (end.clamp(max=sizes.seqlen_k) - begin).clamp(min=0)
        # A tile's beginning and end take about as long as a step.
        lengths = ((keys + tile.tile_n - 1) // tile.tile_n + 1).tolist()
        heads = sizes.batch * sizes.heads_q
        kv_bytes = sizes.seqlen_k * columns * self._dtype.itemsize
        return heads_a_group(lengths, heads, sizes.heads_q // sizes.heads_k, kv_bytes, blocks)

    def _extras(self, tensors: Sequence[torch.Tensor], state: torch.Tensor | None) -> list[torch.Tensor | None]:
        """The tensors of `_extra_names`, None for a null pointer."""
        extras: list[torch.Tensor | None] = [
            None if index is None else tensors[index] for index in self._tensor_indices
        ]
        extras += self._made
        if state is not None:
            extras.append(state)
        return extras


def in_parts(
    kernels: Mapping[str, KernelPlan], sizes: Sizes, num_splits: int | None, device: torch.device
) -> tuple[KernelPlan, int, int]:
    """Where the keys may be split: the kernel of a part, its blocks, and into how many parts."""
    sharing = sizes.heads_q // sizes.heads_k if kernels["fwd"].shares_keys else 1
    kernel = kernels["decode" if sizes.seqlen_q * sharing <= MOST_DECODE_ROWS else "fwd"]
    tile = kernel.tile
    assert isinstance(tile, TileConfig)
    tiles = sizes.batch * sizes.heads_q // sharing * -(-sizes.seqlen_q * sharing // tile.tile_m)
    if num_splits is None:
        at_once = multiprocessors(device) * tile.blocks_per_sm
        num_splits = splits(tiles, -(-sizes.seqlen_k // tile.tile_n), at_once)
    return kernel, tiles, num_splits


# By device and stream, a zero for kernels that count the tiles that they take, and leave it a zero.
_COUNTERS: dict[tuple[int | None, int], torch.Tensor] = {}


def zero_counter(device: torch.device, own: bool = False) -> torch.Tensor:
    """int32 (1,): 0 when the next launch on the current stream begins, if every launch with it leaves 0.

    `own`: of the launch alone. So it is under capture, for a graph may run beside the stream; and where graphs are made
    of compiled code, memory of their pools must not be kept.
    """
    if (
        own
        or device.type == "cpu"
        or device.index != torch.cuda.current_device()  # whose stream may be under capture, too
        or torch.cuda.is_current_stream_capturing()
    ):
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device.index, current_stream(device.index))
    counter = _COUNTERS.get(key)
    if counter is None:
        counter = _COUNTERS[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return counter


class Recent:
    """The last prepared call of each set of values, found in a third of the time that the shapes, strides, dtypes and
    devices of its tensors take as a key. Any number of threads may use it at once."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], tuple[Callable[..., bool], Call]] = {}

    def find(self, values: tuple[Any, ...], *tensors: torch.Tensor) -> Call | None:
        """The call, if the last one with `values` had such tensors."""
        try:
            alike, call = self._calls[values]
            return call if alike(*tensors) else None
        except (KeyError, TypeError):  # also what cannot be hashed, or fewer tensors: the checks say what should be
            return None

    def note(self, call: Call, values: tuple[Any, ...], *tensors: torch.Tensor) -> None:
        """`call` is the last one with `values`."""
        if not call.cacheable or TensorGuards is None:
            return
        if len(self._calls) >= MOST:
            self._calls.clear()
        with suppress(TypeError):  # a list where a tuple should be
            # How torch.compile checks the inputs of a graph: type, dtype, device, sizes, strides and more, in one step.
            guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._calls[values] = guards.check, call


class _Backward:
    """The backward of a `Call` for gradients of o and lse of certain strides."""

    def __init__(
        self,
        kernels: Mapping[str, Kernel],
        sizes: Sizes,
        fields: Mapping[str, Any],
        extra_names: Sequence[str],
        value_gradients: Sequence[ValueGradient],
        sink: int | None,
        saved: Saved,
        d_o: torch.Tensor,
        needed: Sequence[bool],
    ) -> None:
        self._needed = tuple(needed)
        need_q, need_k, need_v = self._needed[:3]
        self._value_gradients = value_gradients
        need_value = any(needed[3 + gradient.place] for gradient in value_gradients)
        # The kernels of the forward alone take the sink.
        of_backward = {field.name for field in kernels["bwd"].plan.params.fields}
        self._kept = [index for index, name in enumerate(extra_names) if name in of_backward]
        self._sink = sink
        need_sink = sink is not None and self._needed[3 + sink]
        extra_names = [extra_names[index] for index in self._kept]
        for name, x in zip(("d_q", "d_k", "d_v"), saved[:3], strict=True):
            fields = {**fields, **strides(name, _contiguous(x.shape))}
        spec = kernels["fwd"].plan.spec
        delta_shape = stats_shape(spec, sizes, saved.q)[:-1]
        self._new_delta = _allocator(delta_shape, torch.float32, saved.q.device)
        inputs: tuple[str, ...] = ("q", "k", "v", "d_o", "stats", "delta")
        main = kernels["bwd"]
        # What packed sequences need where no keys are read, and where in the extras it is.
        self._begins = [index for index, name in enumerate(extra_names) if name == "cu_seqlens_q"]
        begins = [extra_names[index] for index in self._begins]
        self._packed = bool(begins)
        self._deterministic = "bwd_dq" in kernels
        if self._packed:
            assert isinstance(main.plan.tile, BackwardTile | HopperBackwardTile)
            fields = {**fields, "dq_tiles": packed_tiles(sizes, saved.q, main.plan.tile.tile_m)}
        self._hopper = isinstance(main.plan.tile, HopperBackwardTile)
        self._delta: Launch | None = None
        self._main: Launch | None = None
        self._convert: Launch | None = None
        self._dq: Launch | None = None
        self._dq_sum_floats = self._turns = 0
        # dV does without delta: what the kernel makes of memory that nobody wrote goes into dS only.
        if need_q or need_k or need_value or need_sink:
            rows = sizes.batch * sizes.heads_q * -(-sizes.seqlen_q // STATS_ROWS) * STATS_ROWS
            grid = rows // (kernels["bwd_delta"].plan.threads // _DELTA_LANES)
            self._delta = Launch(kernels["bwd_delta"], grid, fields, ("o", "d_o", "d_lse", "stats", "delta", *begins))
        if need_k or need_v or need_value or (need_q and not self._deterministic):
            tile = main.plan.tile
            assert isinstance(tile, BackwardTile | HopperBackwardTile)
            grid = sizes.batch * sizes.heads_k * -(-sizes.seqlen_k // tile.tile_n)
            self._sums = [] if self._deterministic else ["dq_sum"]
            if self._hopper and main.plan.spec.deterministic:
                self._sums.append("turns")
            maps: dict[str, TensorMap] = {}
            if isinstance(tile, HopperBackwardTile):
                queries, keys = tile.tile_m, tile.tile_n
                dk, dv = _contiguous(saved.k.shape), _contiguous(saved.v.shape)
                boxes = {"q": (saved.q, queries), "k": (saved.k, keys), "v": (saved.v, keys), "d_o": (d_o, queries)}
                maps = _maps(saved.q, {**boxes, "d_k": (dk, 64), "d_v": (dv, 64)})
                inputs = (*maps, "stats", "delta")
            outputs = ("d_k", "d_v", *self._sums, *(gradient.name for gradient in value_gradients))
            self._main = Launch(main, grid, fields, (*inputs, *outputs, *extra_names), maps)
        if need_q and self._deterministic:
            kernel = kernels["bwd_dq"]
            self._dq = Launch(kernel, _query_tiles(sizes, kernel), fields, (*inputs, "d_q", *extra_names))
        elif need_q:
            tiles = sum_tiles = _query_tiles(sizes, main)
            if self._packed:
                sum_tiles = sizes.heads_q * fields["dq_tiles"]
            self._dq_sum_floats = sum_tiles * main.plan.sum_tile.floats
            if isinstance(tile, HopperBackwardTile) and main.plan.spec.deterministic:
                self._turns = sum_tiles * tile.consumers
            self._convert = Launch(kernels["bwd_convert"], tiles, fields, ("dq_sum", "d_q", *begins))

    def __call__(
        self,
        d_o: torch.Tensor,
        d_lse: torch.Tensor | None,
        saved: Saved,
        tensors: Sequence[torch.Tensor],
        extras: Sequence[torch.Tensor | None],
        poison: bool,
    ) -> Gradients:
        q, k, v, o, stats, lse = saved
        extras = [extras[index] for index in self._kept]
        device = q.device
        need_q, need_k, need_v, *need_tensors = self._needed
        # No kernel writes rows of no packed sequence, or of keys that do not count.
        new = torch.zeros_like if self._packed else torch.empty_like
        dq = new(q, memory_format=torch.contiguous_format) if need_q else None
        dk = new(k, memory_format=torch.contiguous_format) if need_k else None
        dv = new(v, memory_format=torch.contiguous_format) if need_v else None
        delta = self._new_delta()
        if poison:
            _poison(delta, *(() if self._packed else (dq, dk, dv)))
        dq_sum = turns = None
        if self._dq_sum_floats:
            dq_sum = torch.zeros(self._dq_sum_floats, dtype=torch.float32, device=device)
        if self._turns:
            turns = torch.zeros(self._turns, dtype=torch.int32, device=device)
        of_values = [
            torch.zeros(gradient.shape, dtype=torch.float32, device=device) if need_tensors[gradient.place] else None
            for gradient in self._value_gradients
        ]
        begins = [extras[index] for index in self._begins]
        if self._delta is not None:
            self._delta(o, d_o, d_lse, stats, delta, *begins)
        if self._main is not None:
            sums = (dq_sum, turns)[: len(self._sums)]
            outputs = (dk, dv) if self._hopper else ()
            self._main(q, k, v, d_o, *outputs, stats, delta, dk, dv, *sums, *of_values, *extras)
        if self._convert is not None:
            self._convert(dq_sum, dq, *begins)
        if self._dq is not None:
            self._dq(q, k, v, d_o, stats, delta, dq, *extras)
        of_tensors: list[torch.Tensor | None] = [None] * len(need_tensors)
        for gradient, total in zip(self._value_gradients, of_values, strict=True):
            if total is not None:
                of_tensors[gradient.place] = gradient.finish(total, tensors[gradient.place])
        if self._sink is not None and need_tensors[self._sink]:
            of_tensors[self._sink] = _sink_gradient(tensors[self._sink], lse, delta, begins)
        return dq, dk, dv, *of_tensors


def _sink_gradient(
    sink: torch.Tensor, lse: torch.Tensor | None, delta: torch.Tensor, begins: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """(Hq,): minus the sum of P_sink * delta over the rows of a head. lse (B, Hq, Sq), or (Hq, Tq) of packed sequences
    that begin at the rows `begins`; delta as the kernel leaves it, padded."""
    assert lse is not None
    weight = torch.exp(sink[:, None] - lse).masked_fill(lse == -math.inf, 0.0)
    if not begins:
        return -(weight * delta[..., : lse.shape[2]]).sum((0, 2))
    (ends,) = begins
    assert ends is not None
    rows = torch.arange(lse.shape[1], device=lse.device)
    sequence = torch.searchsorted(ends[1:], rows, right=True, out_int32=True).clamp(max=len(ends) - 2)
    first = ends[sequence]
    places = rows - first + (first // STATS_ROWS + sequence) * STATS_ROWS
    of_none = (rows < ends[0]) | (rows >= ends[-1])  # no kernel writes their lse
    terms = weight * delta[:, places.clamp(0, delta.shape[1] - 1)]
    return -terms.masked_fill(of_none, 0.0).sum(1)


def multiprocessors(device: torch.device) -> int:
    """Blocks that run at once, one a multiprocessor; a few where blocks are emulated, so that each has many tiles."""
    if device.type == "cpu":
        return _EMULATED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _query_tiles(sizes: Sizes, kernel: Kernel) -> int:
    tile = kernel.plan.tile
    assert not isinstance(tile, LinearTile)
    return sizes.batch * sizes.heads_q * -(-sizes.seqlen_q // tile.tile_m)


def _maps(like: torch.Tensor, boxes: Mapping[str, tuple[torch.Tensor, int]]) -> dict[str, TensorMap]:
    """Tensor maps of `boxes`, a tensor and the rows of a box each, with the dtype and on the device of `like`."""
    half, emulate = like.dtype == torch.float16, like.device.type == "cpu"
    return {
        f"{name}_map": TensorMap(x.shape, x.stride(), rows, is_half=half, emulate=emulate)
        for name, (x, rows) in boxes.items()
    }


def _contiguous(shape: Sequence[int]) -> torch.Tensor:
    """A tensor of that shape for its strides."""
    return torch.empty(tuple(shape), device="meta")


def _allocator(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """Makes contiguous tensors of that shape, uninitialised, in less time than torch.empty."""
    strides = _contiguous(shape).stride()
    return partial(torch.empty_strided, tuple(shape), strides, dtype=dtype, device=device)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as `forward` made it: a hook on saved tensors may have brought back one that lies otherwise."""
    if tensor.is_contiguous() and not tensor.data_ptr() % ALIGNMENT:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _poison(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.fill_(math.nan)
