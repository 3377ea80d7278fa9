"""Is a kernel that splits keys right for few queries over many keys? A grid of calls beside the float64 reference, each
with the keys in as many parts as the card wants, in one, and in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fagen.check import (
    OUTPUT_BUDGET,
    Case,
    Comparison,
    badness,
    compare_lse,
    compare_o,
    jsonable,
    main_kernel,
    pair_of_heads,
    seconds_on_gpu,
)
from fagen.errors import LaunchError, SpecError
from fagen.spec import AttentionSpec

SEVERAL = 5  # no divisor of what a power of two of keys has in tiles, and more than a few keys have
QUERIES = (1, 3, 8, 16)  # of the ragged calls, in turns; the others have one


FEW_DIMS = 128  # heads of fewer are as many more: chance rules the norm of an error over a few hundred elements


@dataclass(frozen=True)
class Grid:
    """All of its axes together, but for calls with more than `most` keys in all."""

    batches: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]  # of q, and of k and v
    keys: tuple[int, ...]
    most: int


ON_GPU = Grid((1, 16, 128), ((32, 8), (16, 16)), (256, 1024, 4096, 16384, 65536, 131072), 1 << 18)
EMULATED = Grid((1, 3), ((6, 2), (4, 4)), (256, 500), 1 << 11)


@dataclass(frozen=True)
class DecodeCall:
    """What one call gave. `seconds`: the median of several on a GPU, None emulated. `bytes`: of q, o, and the keys and
    values that count."""

    case: Case
    o: Comparison
    lse: Comparison
    seconds: float | None
    bytes: int

    @property
    def passed(self) -> bool:
        return self.o.passed and self.lse.passed

    @property
    def tbps(self) -> float | None:
        """TB/s."""
        return self.bytes / self.seconds / 1e12 if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON can hold them: numbers that are not finite as strings."""
        case = self.case
        names = ("batch", "heads", "heads_k", "seqlen_q", "seqlen_k", "ragged", "num_splits")
        fields = {name: getattr(case, name) for name in names}
        fields |= {"o": asdict(self.o), "lse": asdict(self.lse), "passed": self.passed}
        fields |= {"seconds": self.seconds, "tbps": self.tbps, "bytes": self.bytes}
        return {name: jsonable(value) for name, value in fields.items()}


@dataclass(frozen=True)
class DecodeCheckResult:
    """What `check_decode` found."""

    spec: AttentionSpec
    slug: str  # of the main kernel
    arch: str
    device: str  # the card's name, or "CPU (emulated)"
    emulated: bool
    seed: int
    smem_bytes: dict[str, int]  # dynamic shared memory a block, by the kind of the kernel
    calls: tuple[DecodeCall, ...]

    @property
    def passed(self) -> bool:
        return all(call.passed for call in self.calls)

    @property
    def worst(self) -> DecodeCall:
        """The call that is furthest off for what it may be."""
        return max(self.calls, key=lambda call: max(badness(call.o), badness(call.lse)))

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON can hold them."""
        names = ("slug", "arch", "device", "emulated", "seed", "smem_bytes", "passed")
        fields = {"spec": self.spec.model_dump(mode="json")} | {name: getattr(self, name) for name in names}
        return fields | {"calls": [call.to_json() for call in self.calls]}


def problems(
    spec: AttentionSpec,
    emulated: bool,
    *,
    batch: int | None = None,
    heads: int | None = None,
    heads_k: int | None = None,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    seed: int = 0,
) -> list[Case]:
    """The calls, each with all of its keys and once ragged. A size that is given takes the place of the grid's.

    Raises SpecError for a spec that splits no keys, and for sizes that cannot be.
    """
    if not spec.split_kv:
        raise SpecError("--decode checks kernels that split the keys: add --split-kv")
    for name, size in (("batch", batch), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if size is not None and size < 1:
            raise SpecError(f"{name}={size} must be positive")
    grid = EMULATED if emulated else ON_GPU
    batches = grid.batches if batch is None else (batch,)
    lengths = grid.keys if seqlen_k is None else (seqlen_k,)
    more = max(1, FEW_DIMS // spec.dim_v)
    pairs = [(more * of_q, more * of_k) for of_q, of_k in grid.heads]
    if heads is not None or heads_k is not None:
        pairs = [pair_of_heads(heads, heads_k)]
    shapes = [
        Case(spec=spec, batch=b, heads=of_q, heads_k=of_k, seqlen_q=seqlen_q or 1, seqlen_k=keys, seed=seed)
        for of_q, of_k in pairs
        for b in batches
        for keys in lengths
        if b * keys <= max(grid.most, batches[0] * lengths[0])  # at least the smallest, whatever sizes are given
    ]
    queries = [seqlen_q] if seqlen_q else QUERIES
    ragged = (replace(case, ragged=True, seqlen_q=queries[i % len(queries)]) for i, case in enumerate(shapes))
    return [case for pair in zip(shapes, ragged, strict=True) for case in pair]


def check_decode(
    cases: Sequence[Case],
    *,
    arch: str | None = None,
    emulate: bool | None = None,
    on_done: Callable[[Case], None] = lambda case: None,
) -> DecodeCheckResult:
    """Builds the kernels of the cases' spec, which is one, and runs each on the GPU if there is one, else emulated.

    Results and what lies between the kernels are filled with NaN before the launch, as is what lies behind the keys of
    ragged calls. Raises LaunchError, which names the call, for one that stops with a fault, and what `fagen.load`
    raises.
    """
    from fagen.ops import load

    spec = cases[0].spec
    emulated = not torch.cuda.is_available() if emulate is None else emulate
    device = torch.device("cpu") if emulated else torch.device("cuda", torch.cuda.current_device())
    attention = load(spec, arch=arch, emulate=emulated)
    calls: list[DecodeCall] = []
    for case in cases:
        calls += _calls(case, attention, device)
        on_done(case)
    plans = {kind: kernel.plan for kind, kernel in attention.kernels(device).items()}
    kernel = main_kernel([*plans.values()])
    return DecodeCheckResult(
        spec=spec,
        slug=kernel.slug,
        arch=kernel.arch.name,
        device="CPU (emulated)" if emulated else torch.cuda.get_device_name(device),
        emulated=emulated,
        seed=cases[0].seed,
        smem_bytes={kind: plan.smem_bytes for kind, plan in plans.items()},
        calls=tuple(calls),
    )


def _calls(case: Case, attention: Any, device: torch.device) -> Iterator[DecodeCall]:
    """One problem, its keys in each number of parts."""
    spec = case.spec
    inputs = case.inputs(device, drawn_there=True)
    expected_o, expected_lse = case.reference(inputs)
    columns = (spec.head_dim + spec.dim_v) * inputs.q.element_size()
    moved = (sum(case.used) * case.heads_k + case.batch * case.seqlen_q * case.heads) * columns
    for parts in (None, 1, SEVERAL):
        split = replace(case, num_splits=parts)

        def call(poison: bool = False, parts: int | None = parts) -> Any:
            return attention(
                inputs.q, inputs.k, inputs.v, num_splits=parts, return_lse=True, _poison=poison, **inputs.call
            )

        try:
            o, lse = call(poison=True)
            seconds = None if device.type == "cpu" else seconds_on_gpu(call)
        except LaunchError as error:
            raise LaunchError(f"{split.id}: {error}") from error
        compared = compare_o(o, expected_o, OUTPUT_BUDGET[spec.dtype]), compare_lse(lse, expected_lse)
        yield DecodeCall(split, *compared, seconds, moved)
