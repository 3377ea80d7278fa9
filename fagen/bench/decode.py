"""How fast one query a sequence is attended to: bound by how fast memory gives its keys and values, which is why each
row stands beside a copy. Calls are replayed as a CUDA graph, as decoding runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from fagen.bench import goals, results, speed
from fagen.bench.contestants import CUDNN, Contestant, choose, decoders
from fagen.bench.results import OURS, Rates, Report, Table, beside, number, percent, quotient, small
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    import torch

    Call = Callable[[], torch.Tensor]

HEAD_DIM = 128
HEADS, HEADS_K = 32, 8
PAGE = 256  # keys

# The keys of all that is read between two readings of the same ones, in L2 caches: little of it is still there then.
CACHES = 4
# A graph's launch takes some microseconds: a replay reads so much that it takes a millisecond, or makes as many calls.
REPLAY_BYTES, MOST_CALLS = 4e9, 20

GRID_BATCHES = (1, 16, 128)
GRID_HEADS = ((HEADS, HEADS_K), (64, 8), (16, 16))
GRID_KEYS = (256, 1024, 4096, 16384, 65536, 131072)
GRID_BYTES = 9e9  # keys and values of a row at most: there are four such tensors at once

ONE_PART, PAGED, COPY = f"{OURS} num_splits=1", f"{OURS} paged", "copy"


@dataclass(frozen=True)
class Row:
    """One problem: a query for each of `batch` sequences of `keys`, bf16, no mask."""

    batch: int
    keys: int
    heads: int = HEADS
    heads_k: int = HEADS_K

    @property
    def name(self) -> str:
        """As the tables call it, "B=16 4k keys", with "64/8 heads" where they are others than those of the goals."""
        heads = "" if (self.heads, self.heads_k) == (HEADS, HEADS_K) else f" {self.heads}/{self.heads_k} heads"
        return f"B={self.batch} {speed.short_length(self.keys)} keys{heads}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * 2 * self.batch * self.keys * self.heads_k * HEAD_DIM

    @property
    def bytes(self) -> int:
        """What a call must read and write: keys, values, queries and outputs."""
        return self.kv_bytes + 2 * 2 * self.batch * self.heads * HEAD_DIM

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(head_dim=HEAD_DIM, split_kv=True)

    @property
    def reference(self) -> goals.Reference | None:
        """What the row is to reach, for the rows of the tables."""
        return goals.DECODE.get(self.name)


@dataclass(frozen=True)
class Result(Rates):
    """TB/s of each contestant: of keys, values, queries and outputs; of the copy, what it reads and writes. The
    difference is the largest of the outputs of fagen's contestants."""

    row: Row

    def microseconds(self, name: str) -> float | None:
        """The time of a call."""
        rate = self.rates.get(name)
        return None if rate is None else self.row.bytes / rate / 1e6

    @property
    def share_of_copy(self) -> float | None:
        """fagen's part of the rate of a copy as large as keys and values."""
        return quotient(self.rates.get(OURS), self.rates.get(COPY))


@dataclass(frozen=True)
class DecodeReport(Report):
    """`smem_bytes`: dynamic shared memory a block of each of fagen's kernels."""

    results: tuple[Result, ...]
    smem_bytes: Mapping[str, int]


def copies(kv_bytes: int, cache_bytes: int) -> int:
    """How many copies of such keys and values take turns, so that a cache of such a size holds none of them long."""
    return math.ceil(CACHES * cache_bytes / kv_bytes)


def calls(kv_bytes: int, copies: int) -> int:
    """How many calls a graph makes: each copy as often as each other."""
    wanted = min(MOST_CALLS, math.ceil(REPLAY_BYTES / kv_bytes))
    return copies * math.ceil(wanted / copies)


def rows() -> tuple[Row, ...]:
    """The rows that have goals."""
    return (Row(1, 16384), Row(1, 131072), Row(16, 16384), Row(128, 4096))


def grid() -> tuple[Row, ...]:
    """Batches, heads and numbers of keys, all together, but for those that take too much memory."""
    product = (Row(b, keys, *heads) for heads in GRID_HEADS for b in GRID_BATCHES for keys in GRID_KEYS)
    return tuple(row for row in product if row.kv_bytes <= GRID_BYTES)


def run(
    chosen: Sequence[Row],
    *,
    against: Sequence[Contestant] | None = None,
    arch: str | None = None,
    samples: int = 30,
    on_done: Callable[[Row], None] = lambda row: None,
) -> DecodeReport:
    """Measures `chosen` on the current GPU, beside `against` (by default all that are installed): medians of `samples`
    timings by CUDA events. A contestant that fails in a row has no figure there, and neither has fagen.

    Raises ToolchainError without a GPU that PyTorch can use, and what `fagen.load` raises where there is no kernel.
    """
    where = speed.machine(chosen, arch)
    import torch

    against = choose(among=decoders()) if against is None else against
    measured = []
    for row in chosen:
        measured.append(measure(row, against=against, arch=arch, samples=samples))
        torch.cuda.empty_cache()  # the sizes of the next row fit into none of the blocks that this one leaves
        on_done(row)
    kernels = speed.load(chosen[0].spec, arch).kernels(torch.device("cuda", torch.cuda.current_device()))
    return DecodeReport(where, tuple(measured), {kind: kernel.plan.smem_bytes for kind, kernel in kernels.items()})


def measure(row: Row, *, against: Sequence[Contestant], arch: str | None = None, samples: int = 30) -> Result:
    """One row on the current GPU."""
    import torch

    cache_bytes: int = torch.cuda.get_device_properties().L2_cache_size
    count_of_copies = copies(row.kv_bytes, cache_bytes)
    inputs = _inputs(row, count_of_copies, "cuda")
    makers = _makers(row, against, arch)
    first, outputs, failures = speed.first_calls(makers, inputs[0])
    others = [contestant.name for contestant in against]
    # cuDNN's before all others: it is what rates are compared with too.
    others.sort(key=lambda name: name != CUDNN)
    difference, compared_with = speed.differences(outputs, (OURS, ONE_PART, PAGED), others)
    count = calls(row.kv_bytes, count_of_copies)
    graphs = {}
    replayed = []  # a graph knows addresses only: what its calls hold must live as long
    for name, call in first.items():
        try:
            replayed.append([call, *(makers[name](*tensors) for tensors in inputs[1:])])
            graphs[name] = captured(replayed[-1], count)
        except Exception as error:
            failures[name] = speed.first_line(error)
    seconds = {name: taken / count for name, taken in speed.take_turns(graphs, samples).items()}
    moved = dict.fromkeys(makers, row.bytes) | {COPY: 2 * row.kv_bytes}
    rates = {name: moved[name] / seconds[name] / 1e12 if name in seconds else None for name in makers}
    return Result(row, rates, difference, compared_with, failures)


def tables(report: DecodeReport) -> tuple[Table, ...]:
    """Times, and the rates that they are."""
    found = {name for result in report.results for name in result.rates}
    names = [name for name in columns() if name in found]
    attentions = [name for name in names if name != COPY]
    derived = results.shown(
        [
            (f"{OURS} / FA3 scaled", [number(result.fa3_scaled_ratio, 2) for result in report.results]),
            (f"{OURS} / goal", [number(result.goal_ratio, 2) for result in report.results]),
            ("of copy", [percent(result.share_of_copy) for result in report.results]),
            ("difference", [small(result.difference) for result in report.results]),
        ]
    )
    times, rates = [], []
    for index, result in enumerate(report.results):
        figures = (number(result.microseconds(name), 1) for name in attentions)
        cells = (beside(figure, result, name) for figure, name in zip(figures, attentions, strict=True))
        times.append((result.row.name, *cells))
        others = (of_rows[index] for _, of_rows in derived)
        rates.append((result.row.name, *(number(result.rates.get(name), 2) for name in names), *others))
    return (
        Table(("decode, us", *attentions), tuple(times)),
        Table(("decode, TB/s", *names, *(header for header, _ in derived)), tuple(rates)),
    )


def legend(report: DecodeReport) -> list[str]:
    """What the columns mean, a phrase each."""
    parts = [
        "us: of a call, in parentheses how many times as fast as cuDNN in the same turns",
        "TB/s: keys, values, queries and outputs over that time",
        f"{PAGED}: the same keys in pages of {PAGE}, in random order",
        "copy: of as many bytes as keys and values have, read and written, in the same turns",
    ]
    if any(result.goal for result in report.results):
        parts.append("goal, FA3 scaled: what was set and what FlashAttention-3 reached on an H200, scaled by cuDNN")
    others = report.compared_with
    if others:
        parts.append(f"difference: the largest of fagen's outputs from those of {' or '.join(others)}, norm over norm")
    sizes = ", ".join(f"{kind} {count / 1024:.1f} KiB" for kind, count in report.smem_bytes.items() if count)
    return [*parts, *([f"shared memory of fagen's kernels, a block: {sizes}"] if sizes else [])]


def markdown(report: DecodeReport, *, date: str, command: str) -> str:
    """The report as a section of BENCHMARKS.md."""
    about = (
        f"bf16, {HEADS} heads of q over {HEADS_K} of k and v where a row names no others, d{HEAD_DIM}, one query a "
        "sequence, medians of CUDA-event timings taken in turns, of a CUDA graph whose calls read keys that no cache "
        f"holds. {'; '.join(legend(report))}."
    )
    return results.markdown(report, tables(report), about, date=date, command=command)


def columns() -> tuple[str, ...]:
    """All names that a result can have, in the order of the tables."""
    return (OURS, ONE_PART, PAGED, *(contestant.name for contestant in decoders()), COPY)


def _makers(row: Row, against: Sequence[Contestant], arch: str | None) -> dict[str, Callable[..., Call]]:
    """Who takes part in a row: by name, what makes a call of q, k and v."""

    @cache  # one for all copies of the inputs, whose calls it prepares once
    def attention(paged: bool = False) -> Any:
        return speed.load(row.spec.model_copy(update={"paged": paged}), arch)

    def ours(num_splits: int | None = None) -> Callable[..., Call]:
        def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
            loaded = attention()
            return lambda: loaded(q, k, v, num_splits=num_splits)

        return make

    def paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        loaded = attention(paged=True)
        pages_k, pages_v, named = _in_pages(k, v)
        return lambda: loaded(q, pages_k, pages_v, **named)

    def of(contestant: Contestant) -> Callable[..., Call]:
        return lambda q, k, v: contestant.make(q, k, v, False, None)

    makers: dict[str, Callable[..., Call]] = {OURS: ours(), ONE_PART: ours(1), PAGED: paged}
    return makers | {contestant.name: of(contestant) for contestant in against} | {COPY: _copy}


def _inputs(row: Row, copies: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """q (B, 1, Hq, D), the same in each, and k and v (B, S, Hk, D), in each the same values in memory of their own."""
    import torch

    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    q = normal(row.batch, 1, row.heads, HEAD_DIM)
    k, v = (normal(row.batch, row.keys, row.heads_k, HEAD_DIM) for _ in range(2))
    return [(q, k, v), *((q, k.clone(), v.clone()) for _ in range(copies - 1))]


def _in_pages(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """k and v (B, S, Hk, D) as (pages, PAGE, Hk, D) in random order, and the arguments that say where they are."""
    import torch

    batch, keys, heads, dim = k.shape
    count = batch * keys // PAGE
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(k.device)
    pages = []
    for x in (k, v):
        made = x.new_empty(count, PAGE, heads, dim)
        made[order] = x.view(count, PAGE, heads, dim)
        pages.append(made)
    used = torch.full((batch,), keys, dtype=torch.int32, device=k.device)
    return pages[0], pages[1], {"block_table": order.int().view(batch, -1), "seqused_k": used}


def _copy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """Reads and writes as many bytes as k and v have. By a kernel: in a graph, a copy of more than 512 MB runs at two
    thirds of that speed."""
    import torch

    source = torch.cat([k.flatten(), v.flatten()])
    destination = torch.empty_like(source)
    return lambda: torch.mul(source, 1, out=destination)


def captured(calls: Sequence[Call], count: int) -> Callable[[], Any]:
    """What replays `count` of the calls, in turn, as one CUDA graph."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            calls[index % len(calls)]()
    return graph.replay
