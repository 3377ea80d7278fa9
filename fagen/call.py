"""What a call of an attention kernel may be, and the values of its kernel parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fagen.arch.sm80 import LEAST_PAGE
from fagen.errors import SpecError
from fagen.mods import LOG2E, CallContext, positive_float
from fagen.reference import keep_threshold
from fagen.spec import AttentionSpec

log = logging.getLogger("fagen")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALIGNMENT = 16  # bytes of one asynchronous copy
MAX_SEQLEN = 2**30 - 1  # positions and window bounds are summed in 32 bits
MOST_SPLITS = 128  # parts of the keys
STATS_ROWS = 128  # the statistics of a head are padded to a multiple of this many rows


class Sizes(NamedTuple):
    """The sizes of a call, but for the head dims, which the spec has."""

    batch: int
    seqlen_q: int
    heads_q: int
    seqlen_k: int
    heads_k: int

    @property
    def trivial(self) -> bool:
        """There is no row of o, or no key for it to see: nothing to compute, o = 0, lse = -inf and gradients of 0."""
        return not (self.batch and self.seqlen_q and self.heads_q and self.seqlen_k)


def lse_shape(spec: AttentionSpec, q: torch.Tensor) -> tuple[int, ...]:
    """(B, Hq, Sq), or (Hq, Tq) of packed sequences."""
    return (q.shape[1], q.shape[0]) if spec.varlen else (q.shape[0], q.shape[2], q.shape[1])


def stats_shape(spec: AttentionSpec, sizes: Sizes, q: torch.Tensor) -> tuple[int, ...]:
    """Shape of the statistics that a forward leaves to the backward, float32; delta has the same but for the last.

    (B, Hq, Sq padded to 128, 2), or (Hq, rows, 2) of packed sequences, where that of number b begins at row
    (cu_seqlens_q[b] // 128 + b) * 128: so the host need not know the lengths, and no two share a row.
    """
    if spec.varlen:
        return sizes.heads_q, packed_tiles(sizes, q, STATS_ROWS) * STATS_ROWS, 2
    padded_q = (sizes.seqlen_q + STATS_ROWS - 1) // STATS_ROWS * STATS_ROWS
    return sizes.batch, sizes.heads_q, padded_q, 2


def packed_tiles(sizes: Sizes, q: torch.Tensor, rows: int) -> int:
    """Tiles of `rows` queries of all packed sequences, each from cu_seqlens_q[b] // rows + b on."""
    return q.shape[0] // rows + sizes.batch


class Packed(NamedTuple):
    """Where packed sequences lie, or which keys of a batch count."""

    # As PACKED_TENSORS names them with spec.varlen, CACHE_TENSORS with spec.split_kv; of a prepared call True for each
    # tensor. None where none is given.
    tensors: tuple[torch.Tensor | bool | None, ...]
    max_seqlen_q: int | None
    max_seqlen_k: int | None


CACHE_TENSORS = ("seqused_k", "block_table", "leftpad_k", "cache_batch_idx")
_OF_PAGES = ("block_table",)  # a parameter of kernels with paged caches alone
PACKED_TENSORS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")


def named(spec: AttentionSpec, packed: Packed | None, name: str) -> Any:
    """What a call of `spec` gives as `name`, one of its tensors of sequences."""
    names = PACKED_TENSORS if spec.varlen else CACHE_TENSORS if spec.split_kv else ()
    return packed.tensors[names.index(name)] if packed is not None and name in names else None


class Values(NamedTuple):
    """What a call gives besides q, k, v and the state of the random numbers."""

    softmax_scale: float | None
    window: tuple[int, int] | None
    dropout_p: float | None
    mods: tuple[Any, ...]  # in the order of spec.valued: numbers and tensors
    packed: Packed | None = None
    num_splits: int | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The values of modifications that are tensors, in order, and those of packed sequences."""
        packed = () if self.packed is None else self.packed.tensors
        return tuple(value for value in (*self.mods, *packed) if isinstance(value, torch.Tensor))

    def without_tensors(self) -> Values:
        """The same without the memory of the tensors."""
        mods = tuple(None if isinstance(value, torch.Tensor) else value for value in self.mods)
        packed = self.packed
        if packed is not None:
            packed = packed._replace(tensors=tuple(None if value is None else True for value in packed.tensors))
        return self._replace(mods=mods, packed=packed)

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Values:
        """The same with `tensors` in their places."""
        rest = iter(tensors)
        mods = tuple(next(rest) if value is None else value for value in self.mods)
        packed = self.packed
        if packed is not None:
            packed = packed._replace(tensors=tuple(None if value is None else next(rest) for value in packed.tensors))
        return self._replace(mods=mods, packed=packed)


class ValueGradient(NamedTuple):
    """The gradient of the value of a modification, prepared."""

    place: int  # of the value in Values.tensors()
    name: str  # of the kernel's parameter with the address of the sum
    shape: tuple[int, ...]  # of the sum
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (sum, value) -> gradient


class Scalars(NamedTuple):
    """The parameters of the kernels that `Values` give."""

    softmax_scale: float
    fields: Mapping[str, Any]
    # Fields that hold the address of a tensor of the call: its index in Values.tensors(), None for a null pointer.
    tensors: Mapping[str, int | None]
    made: Mapping[str, torch.Tensor]  # fields that hold the address of a tensor which a modification made of its value
    gradients: tuple[ValueGradient, ...]  # of the modifications that have one, with spec.backward


def check_tensors(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed | None = None
) -> Sizes:
    """The sizes of a call; SpecError unless the tensors fit the spec and one another. Of packed sequences, which need
    `packed`, seqlen_q and seqlen_k are those of the longest."""
    dims_q = ("total", "heads", "head_dim") if spec.varlen else ("batch", "seqlen", "heads", "head_dim")
    dims_k = ("pages", "page_size", "heads", "head_dim") if spec.paged else dims_q
    for name, tensor, dim, dims in (
        ("q", q, spec.head_dim, dims_q),
        ("k", k, spec.head_dim, dims_k),
        ("v", v, spec.dim_v, dims_k),
    ):
        if not isinstance(tensor, torch.Tensor):
            raise SpecError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != len(dims):
            raise SpecError(f"{name} has {tensor.dim()} dimensions; expected ({', '.join(dims)})")
        if tensor.dtype != DTYPES[spec.dtype]:
            raise SpecError(f"{name} has dtype {tensor.dtype}; the spec's dtype is {spec.dtype} ({DTYPES[spec.dtype]})")
        if tensor.shape[-1] != dim:
            raise SpecError(f"{name} has head dim {tensor.shape[-1]}; the spec's is {dim}")
        if tensor.device != q.device:
            raise SpecError(f"{name} is on {tensor.device}, q on {q.device}; all tensors must be on one device")
        if tensor.stride(-1) != 1:
            raise SpecError(
                f"{name} has stride {tensor.stride(-1)} in its last dimension, which must be contiguous: "
                f"pass {name}.contiguous()"
            )
        if tensor.shape[-3] > MAX_SEQLEN:
            raise SpecError(f"{name} has {tensor.shape[-3]} positions; at most {MAX_SEQLEN} are served")
    seqlen_q, heads_q, _ = q.shape[-3:]
    seqlen_k, heads_k, _ = k.shape[-3:]
    batch = 1 if spec.varlen else q.shape[0]
    other_batch = k.shape[0] != batch and named(spec, packed, "cache_batch_idx") is None
    if not (spec.paged or spec.varlen) and (v.shape[0] != k.shape[0] or other_batch):
        raise SpecError(f"q, k and v have batches of {batch}, {k.shape[0]} and {v.shape[0]}; they must be equal")
    if v.shape[-3] != k.shape[-3] or v.shape[-2] != heads_k:
        raise SpecError(
            f"k is {tuple(k.shape[:-1])} and v {tuple(v.shape[:-1])} in ({', '.join(dims_k[:-1])}): must be equal"
        )
    if heads_k == 0 or heads_q % heads_k:
        raise SpecError(f"{heads_q} query heads over {heads_k} key heads: the first must be a multiple of the second")
    sizes = Sizes(batch, seqlen_q, heads_q, seqlen_k, heads_k)
    if spec.varlen:
        sizes = _packed_sizes(sizes, packed, q.device)
    if not spec.paged:
        return sizes
    most = _paged_length(sizes.batch, k, v, named(spec, packed, "block_table"))
    longest = packed.max_seqlen_k if packed is not None else None
    return sizes._replace(seqlen_k=most if longest is None else min(longest, most))


def _paged_length(batch: int, k: torch.Tensor, v: torch.Tensor, table: Any) -> int:
    """How many keys a batch entry may have: those of all pages in its row of the block table."""
    size = k.shape[1]
    if (
        not isinstance(table, torch.Tensor)
        or (table.dtype, table.device, table.dim()) != (torch.int32, k.device, 2)
        or table.shape[0] != batch
        or table.stride(1) != 1
    ):
        raise SpecError(
            f"block_table must be an int32 tensor ({batch}, pages) on {k.device}, contiguous in its last dimension"
        )
    if v.shape[0] != k.shape[0]:
        raise SpecError(f"k has {k.shape[0]} pages and v {v.shape[0]}; they must be equal")
    if size < LEAST_PAGE or size & (size - 1):
        raise SpecError(f"k has pages of {size} keys; a power of two from {LEAST_PAGE} on is served")
    return table.shape[1] * size


def _packed_sizes(totals: Sizes, packed: Packed | None, device: torch.device) -> Sizes:
    """Number of sequences and lengths of the longest, where q and k have the rows of all."""
    if packed is None:
        raise SpecError("the spec has varlen=True: pass cu_seqlens_q=... and cu_seqlens_k=...")
    entries: int | None = None
    for name, tensor in zip(PACKED_TENSORS, packed.tensors, strict=True):
        if name == "block_table" or (name == "seqused_k" and tensor is None):
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32 or tensor.dim() != 1:
            what = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else repr(tensor)
            raise SpecError(f"{name} is {what}; expected a tensor of one dimension and dtype int32")
        if tensor.device != device:
            raise SpecError(f"{name} is on {tensor.device}, q on {device}; all tensors must be on one device")
        if not tensor.is_contiguous():
            raise SpecError(f"{name} must be contiguous: pass {name}.contiguous()")
        length = tensor.shape[0] + (name == "seqused_k")
        if entries is None:
            entries = length
        if length != entries or not length:
            raise SpecError(
                f"{name} has {tensor.shape[0]} entries, cu_seqlens_q {entries}: both cu_seqlens have one more than "
                "there are sequences, seqused_k as many"
            )
    assert entries is not None
    longest = []
    for name, given, total in (
        ("max_seqlen_q", packed.max_seqlen_q, totals.seqlen_q),
        ("max_seqlen_k", packed.max_seqlen_k, totals.seqlen_k),
    ):
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
            raise SpecError(f"{name}={given!r} must be an integer of at least 0")
        longest.append(total if given is None else min(given, total))
    return totals._replace(batch=entries - 1, seqlen_q=longest[0], seqlen_k=longest[1])


def check_given(feature: str, argument: str, wanted: bool, value: Any) -> None:
    """SpecError where a feature lacks its value, or a value its feature."""
    if wanted and value is None:
        raise SpecError(f"the spec has {feature}=True: pass {argument}=...")
    if not wanted and value is not None:
        raise SpecError(f"{argument} is given, but the spec lacks the feature: AttentionSpec(..., {feature}=True)")


def scalars(spec: AttentionSpec, sizes: Sizes, values: Values, device: torch.device) -> Scalars:
    """The parameters that every kernel of a call takes by value. Raises SpecError for a value that means nothing."""
    given = values.softmax_scale
    scale = spec.head_dim**-0.5 if given is None else positive_float("softmax_scale", given)
    context = CallContext(
        batch=sizes.batch,
        heads_q=sizes.heads_q,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k,
        softmax_scale=scale,
        device=device,
        dtype=spec.dtype,
        deterministic=spec.deterministic,
    )
    fields: dict[str, Any] = {"softmax_scale": scale, "softmax_scale_log2": scale * LOG2E}
    tensors: dict[str, int | None] = {}
    made: dict[str, torch.Tensor] = {}
    gradients: list[ValueGradient] = []
    index = 0
    for mod, value in zip(spec.valued, values.mods, strict=True):
        for name, packed in mod.pack(value, context).items():
            if not isinstance(packed, torch.Tensor):
                fields[name] = packed
            elif packed is value:
                tensors[name] = index
            else:
                made[name] = packed
        if mod.gradient is not None and spec.backward:
            shape, of_sum = mod.gradient.pack(value, context)
            fields |= of_sum
            gradients.append(ValueGradient(index, mod.gradient.sum_name, shape, mod.gradient.finish))
        index += isinstance(value, torch.Tensor)
    names = PACKED_TENSORS if spec.varlen else CACHE_TENSORS if spec.split_kv else ()
    of_sequences = (None,) * len(names) if values.packed is None else values.packed.tensors
    for name, tensor in zip(names, of_sequences, strict=True):
        if spec.split_kv and name not in _OF_PAGES:
            check_of_entries(name, tensor, sizes.batch, device)
        if spec.paged or name not in _OF_PAGES:
            tensors[name] = None if tensor is None else index
        index += tensor is not None
    check_splits(spec, values.num_splits)
    fields |= _window(spec, values.window, sizes)
    fields |= _dropout(spec, values.dropout_p)
    return Scalars(scale, fields, tensors, made, tuple(gradients))


def _window(spec: AttentionSpec, window: tuple[int, int] | None, sizes: Sizes) -> Mapping[str, int]:
    """Bounds for the kernel: -1 becomes a distance past every key, and causal closes the right side."""
    if not spec.window:
        check_given("window", "window", False, None if window in ((-1, -1), [-1, -1]) else window)
        return {}
    check_given("window", "window", True, window)
    if (
        not isinstance(window, tuple | list)
        or len(window) != 2
        or any(isinstance(side, bool) or not isinstance(side, int) or side < -1 for side in window)
    ):
        raise SpecError(f"window={window!r}: expected (left, right), each an integer of at least 0, or -1 for no bound")
    unbounded = sizes.seqlen_q + sizes.seqlen_k
    left, right = (unbounded if side < 0 else min(side, unbounded) for side in window)
    return {"window_left": left, "window_right": 0 if spec.causal else right}


def check_of_entries(name: str, value: Any, batch: int, device: torch.device) -> None:
    """SpecError unless `value` is None or a number for each batch entry."""
    if value is None:
        return
    expected = f"expected int32 ({batch},) on {device}, contiguous"
    if not isinstance(value, torch.Tensor):
        raise SpecError(f"{name}={value!r}; {expected}")
    if (value.dtype, value.device, tuple(value.shape)) != (torch.int32, device, (batch,)) or not value.is_contiguous():
        raise SpecError(f"{name} is {value.dtype} {tuple(value.shape)} on {value.device}; {expected}")


def check_one_place(cache_batch_idx: Any, block_table: Any) -> None:
    """SpecError where both are given."""
    if cache_batch_idx is not None and block_table is not None:
        raise SpecError("cache_batch_idx and block_table exclude each other: both say where entries have their keys")


def check_splits(spec: AttentionSpec, num_splits: int | None) -> None:
    if num_splits is None:
        return
    if not spec.split_kv:
        check_given("split_kv", "num_splits", False, num_splits)
    if isinstance(num_splits, bool) or not isinstance(num_splits, int) or not 1 <= num_splits <= MOST_SPLITS:
        raise SpecError(f"num_splits={num_splits!r} must be an integer from 1 to {MOST_SPLITS}")


def _dropout(spec: AttentionSpec, p: float | None) -> Mapping[str, Any]:
    if not spec.dropout:
        check_given("dropout", "dropout_p", False, None if p == 0 else p)
        return {}
    check_given("dropout", "dropout_p", True, p)
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
        raise SpecError(f"dropout_p={p!r} must be a number of at least 0 and below 1")
    threshold = keep_threshold(p)
    return {"keep_threshold": threshold, "keep_scale": 65536 / threshold}


def philox_state(seed: int | torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """(seed, offset) on `device`, int64: drawn there from PyTorch's generator where `seed` is None.

    Nothing comes from the host but numbers in launches, so that a captured CUDA graph draws anew at each replay.
    """
    if seed is None:
        return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)
    if isinstance(seed, torch.Tensor):
        if seed.shape != (2,) or seed.dtype != torch.int64 or seed.device != device or not seed.is_contiguous():
            raise SpecError(
                f"seed is a tensor {tuple(seed.shape)} of {seed.dtype} on {seed.device}; "
                f"expected (seed, offset), int64 (2,) on {device}, contiguous"
            )
        return seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise SpecError(f"seed={seed!r} must be an integer that fits in 64 bits")
    state = torch.zeros(2, dtype=torch.int64, device=device)
    state[:1].fill_(seed - 2**64 if seed >= 2**63 else seed)
    return state


def strides(name: str, tensor: torch.Tensor) -> dict[str, int]:
    """The stride parameters of a (batch, row, head, dim) tensor, or a packed (row, head, dim) one."""
    dims = ("batch", "row", "head") if tensor.dim() == 4 else ("row", "head")
    return {f"{name}_{dim}_stride": _stride(tensor, index) for index, dim in enumerate(dims)}


def strides_by_head(name: str, tensor: torch.Tensor | None, dims: int = 3) -> dict[str, int]:
    """The stride parameters of a (batch, head, row) tensor, or with two `dims` a (head, row) one; zeros where there is
    none."""
    names = ("batch", "head", "row")[-dims:]
    return {f"{name}_{dim}_stride": 0 if tensor is None else _stride(tensor, index) for index, dim in enumerate(names)}


def rows_aligned(tensor: torch.Tensor) -> bool:
    """The last dimension is contiguous, and the rows start a multiple of 16 bytes apart."""
    step = ALIGNMENT // tensor.element_size()
    return tensor.stride(-1) == 1 and all(_stride(tensor, index) % step == 0 for index in range(tensor.dim() - 1))


def aligned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a contiguous copy where some row of it is none or does not start on a multiple of 16 bytes."""
    if tensor.data_ptr() % ALIGNMENT == 0 and rows_aligned(tensor):
        return tensor
    log.debug("%s is copied: its rows do not start on multiples of %d bytes", name, ALIGNMENT)
    return tensor.clone(memory_format=torch.contiguous_format)


def _stride(tensor: torch.Tensor, index: int) -> int:
    """Stride in elements; 0 for a dimension of one entry, whose stride means nothing and may be anything."""
    return tensor.stride(index) if tensor.shape[index] > 1 else 0
