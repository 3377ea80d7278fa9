"""How fast kernels are: beside other implementations on the same tensors, in turns, so that a drift of the clocks
meets all of them, and beside the goals that were set."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fagen.bench import goals, results
from fagen.bench.contestants import CUDNN, Contestant, choose, everyone
from fagen.bench.results import OURS, Machine, Rates, Report, Table, beside, number, percent, quotient, small
from fagen.errors import FagenError, ToolchainError
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    import torch

TOKENS = 16384  # batch * seqlen of every row
WIDTH = 2048  # heads * head_dim of every row
SOFTCAP = 50.0

MATMUL_SIZE = 8192  # of the square bf16 matrices whose product gives the card's matrix rate
WARM_UP_SECONDS = 0.5  # of all contestants in turns before the first timing: a card's clocks settle under load

# In rows with softcap the same row without it: fagen's kernel, and cuDNN's, which knows no softcap.
PLAIN, CUDNN_PLAIN = "without softcap", "cuDNN without"
PACKED = "fagen packed"  # the same tensors as packed sequences
DETERMINISTIC = "fagen deterministic"
_MATMUL = "matmul"


@dataclass(frozen=True)
class Row:
    """One problem: self-attention of `tokens` in sequences of `seqlen`, bf16."""

    head_dim: int
    causal: bool
    seqlen: int
    softcap: bool = False
    backward: bool = False
    tokens: int = TOKENS
    width: int = WIDTH

    @property
    def name(self) -> str:
        """As the tables call it, "d128 causal 16k softcap"."""
        mask, cap = "causal" if self.causal else "full", " softcap" if self.softcap else ""
        return f"d{self.head_dim} {mask} {short_length(self.seqlen)}{cap}"

    @property
    def batch(self) -> int:
        return self.tokens // self.seqlen

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def flop(self) -> float:
        """Floating-point operations: 4 * B * H * Sq * Sk * D, half of it when causal, 2.5 times it backward."""
        full = 4.0 * self.batch * self.heads * self.seqlen**2 * self.head_dim
        return full * (0.5 if self.causal else 1) * (2.5 if self.backward else 1)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(head_dim=self.head_dim, causal=self.causal, softcap=self.softcap, backward=self.backward)

    @property
    def reference(self) -> goals.Reference | None:
        """What the row is to reach, for the rows of the tables."""
        if (self.tokens, self.width) != (TOKENS, WIDTH):
            return None
        return (goals.BACKWARD if self.backward else goals.FORWARD).get(self.name)


@dataclass(frozen=True)
class Result(Rates):
    """TFLOP/s of each contestant. The difference is that of the outputs, backward of the gradients of q. `matmul`:
    TFLOP/s of a matrix product through cuBLAS in the same turns."""

    row: Row
    matmul: float | None = None

    @property
    def cudnn_name(self) -> str:
        """cuDNN, with softcap on the same row without."""
        return CUDNN_PLAIN if self.row.softcap else CUDNN

    @property
    def share_of_matmul(self) -> float | None:
        """fagen's part of the card's matrix rate."""
        return quotient(self.rates.get(OURS), self.matmul)


@dataclass(frozen=True)
class SpeedReport(Report):
    """`host_us`: microseconds of host time a call, B=1, S=128, d128, as `host_times` gives them, or none
    and the reason in `host_failure`."""

    results: tuple[Result, ...]
    host_us: Mapping[str, float]
    host_failure: str | None = None

    @property
    def direction(self) -> str:
        return "backward" if self.results[0].row.backward else "forward"

    @property
    def matmul(self) -> float | None:
        """TFLOP/s of the matrix product, the median of the rows'."""
        rates = [result.matmul for result in self.results if result.matmul]
        return statistics.median(rates) if rates else None

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each contestant that failed, and one for the host times if they did."""
        host = [f"host times failed: {self.host_failure}"] if self.host_failure else []
        return (*super().failures, *host)


def rows() -> tuple[Row, ...]:
    """The rows of the forward table."""
    lengths = [
        *((64, causal, 16384) for causal in (False, True)),
        *((128, causal, seqlen) for causal in (False, True) for seqlen in (1024, 4096, 16384)),
        *((256, causal, 16384) for causal in (False, True)),
    ]
    capped = [(128, True, 4096), (128, True, 16384), (256, True, 16384)]
    return (*(Row(*row) for row in lengths), *(Row(*row, softcap=True) for row in capped))


def backward_rows() -> tuple[Row, ...]:
    """The rows of the backward table."""
    plain = [(64, True, 16384), (128, False, 16384), (128, True, 4096), (128, True, 16384), (256, True, 16384)]
    return (*(Row(*row, backward=True) for row in plain), Row(128, True, 16384, softcap=True, backward=True))


def run(
    chosen: Sequence[Row],
    *,
    against: Sequence[Contestant] | None = None,
    arch: str | None = None,
    samples: int = 30,
    on_done: Callable[[Row], None] = lambda row: None,
) -> SpeedReport:
    """Measures `chosen` on the current GPU, beside `against` (by default all that are installed): medians of `samples`
    timings by CUDA events. A contestant that fails in a row has no figure there, and neither has fagen.

    Raises ToolchainError without a GPU that PyTorch can use, and what `fagen.load` raises where no row has a kernel.
    """
    where = machine(chosen, arch)
    against = choose() if against is None else against
    measured = []
    for row in chosen:
        measured.append(measure(row, against=against, arch=arch, samples=samples))
        on_done(row)
    host_us: Mapping[str, float] = {}
    host_failure = None
    try:
        host_us = host_times(arch)
    except FagenError as error:
        host_failure = first_line(error)
    return SpeedReport(where, tuple(measured), host_us, host_failure)


def machine(chosen: Sequence[Any], arch: str | None) -> Machine:
    """The current GPU, and what the kernels of the rows are for.

    Raises ToolchainError without a GPU that PyTorch can use, and what `fagen.load` raises where no row has a kernel.
    """
    import torch

    if not torch.cuda.is_available():
        raise ToolchainError("no GPU that PyTorch can use: this measures on one (see fagen doctor)")
    from fagen.driver import driver_version

    driver = driver_version()
    return Machine(
        card=torch.cuda.get_device_name(),
        arch=_target([row.spec for row in chosen], arch),
        torch=torch.__version__,
        driver="unknown" if driver is None else f"CUDA {driver[0]}.{driver[1]}",
    )


def measure(
    row: Row, *, against: Sequence[Contestant] | None = None, arch: str | None = None, samples: int = 30
) -> Result:
    """One row on the current GPU."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    shape = (row.batch, row.seqlen, row.heads, row.head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for tensor in (q, k, v):
        tensor.requires_grad_(row.backward)
    makers = _makers(row, choose() if against is None else against, arch)
    calls, outputs, failures = first_calls(makers, (q, k, v))
    others = [name for name in outputs if name not in (OURS, PACKED, DETERMINISTIC, PLAIN, CUDNN_PLAIN)]
    difference, compared_with = differences(outputs, [OURS, DETERMINISTIC], others)
    outputs.clear()
    seconds = take_turns(calls | {_MATMUL: _matmul()}, samples)
    return Result(
        row,
        {name: row.flop / seconds[name] / 1e12 if name in seconds else None for name in makers},
        difference,
        compared_with,
        failures,
        2 * MATMUL_SIZE**3 / seconds[_MATMUL] / 1e12,
    )


def take_turns(
    contestants: Mapping[str, Callable[[], Any]],
    samples: int,
    warm_up_seconds: float = WARM_UP_SECONDS,
    warm_up_rounds: int = 3,
) -> dict[str, float]:
    """Median seconds of a call of each, by CUDA events: `samples` rounds of one call each, after rounds to warm up.

    The order changes from round to round, so that none always follows one that heats the card or fills its cache.
    """
    import torch

    new_event: Any = torch.cuda.Event
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in contestants}
    order = list(contestants)
    shuffle = random.Random(0).shuffle

    def one_round(timed: bool) -> None:
        shuffle(order)
        for name in order:
            start, end = new_event(enable_timing=True), new_event(enable_timing=True)
            start.record()
            contestants[name]()
            end.record()
            if timed:
                events[name].append((start, end))

    begin = time.perf_counter()
    rounds = 0
    while rounds < warm_up_rounds or time.perf_counter() - begin < warm_up_seconds:
        one_round(timed=False)
        torch.cuda.synchronize()
        rounds += 1
    one_round(timed=False)  # the host gets ahead of the card again
    for _ in range(samples):
        one_round(timed=True)
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3 for name, pairs in events.items()}


def host_times(arch: str | None = None, calls: int = 200, samples: int = 9) -> dict[str, float]:
    """Microseconds that one call keeps the host busy: B=1, S=128, 16 heads of d128.

    By contestant: without autograd, forward under autograd, and forward and backward.
    """
    import torch

    contestants: dict[str, Callable[[], Any]] = {}
    for needs_grad in (False, True):
        inputs = [
            torch.randn(1, 128, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=needs_grad)
            for _ in range(3)
        ]
        forwards = {
            OURS: _ours(AttentionSpec(head_dim=128, backward=needs_grad), arch, *inputs),
            "SDPA": _default_sdpa(*inputs),
        }
        if not needs_grad:
            contestants |= forwards
            continue
        for name, forward in forwards.items():
            d_o = torch.randn_like(forward())
            contestants[f"{name} under autograd"] = forward
            contestants[f"{name} forward and backward"] = _forward_and_backward(forward, inputs, d_o)
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(samples):
        for name, call in contestants.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            taken[name].append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return {name: statistics.median(values) * 1e6 for name, values in taken.items()}


def tables(report: SpeedReport) -> tuple[Table, ...]:
    """The rows without softcap and those with it, each with the contestants that it has."""
    halves = [[result for result in report.results if result.row.softcap is capped] for capped in (False, True)]
    titles = (report.direction, f"{report.direction}, cap {SOFTCAP:g}")
    return tuple(_table(title, results) for title, results in zip(titles, halves, strict=True) if results)


def legend(report: SpeedReport) -> list[str]:
    """What the columns mean, a phrase each."""
    parts = ["TFLOP/s, in parentheses over cuDNN in the same turns (with softcap: over cuDNN without)"]
    if any(result.goal for result in report.results):
        parts.append("goal, FA3 scaled: what was set and what FlashAttention-3 reached on an H200, scaled by cuDNN")
    if any(PACKED in result.rates for result in report.results):
        parts.append(f"{PACKED}: the same tensors as packed sequences")
    if any(DETERMINISTIC in result.rates for result in report.results):
        parts.append(f"{DETERMINISTIC}: gradients that are bitwise equal from run to run")
    if report.matmul:
        size = f"{MATMUL_SIZE} x {MATMUL_SIZE} x {MATMUL_SIZE}"
        parts.append(f"matmul: {size} in bf16 through cuBLAS in the same turns, {report.matmul:.0f} TFLOP/s")
    others = report.compared_with
    if others:
        what = "gradients of q" if report.direction == "backward" else "outputs"
        parts.append(f"difference: of the {what} from those of {' or '.join(others)}, norm over norm")
    return parts


def markdown(report: SpeedReport, *, date: str, command: str) -> str:
    """The report as a section of BENCHMARKS.md."""
    about = (
        f"bf16, {TOKENS} tokens, heads * d = {WIDTH}, medians of CUDA-event timings taken in turns. "
        f"{'; '.join(legend(report))}."
    )
    section = results.markdown(report, tables(report), about, date=date, command=command)
    return "\n\n".join([section, *host_line(report)])


def host_line(report: SpeedReport) -> list[str]:
    """The host times as one line of text, where there are any."""
    times = ", ".join(f"{name} {us:.1f} us" for name, us in report.host_us.items())
    return [f"Host time of one call, B=1, S=128: {times}"] if times else []


def cell(result: Result, name: str) -> str:
    """What a contestant reached in a row, "664 (1.08)" where cuDNN has a figure to compare with."""
    return beside(number(result.rates.get(name)), result, name)


def short_length(count: int) -> str:
    """A number of positions in the name of a row: "16k"."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _table(title: str, of_rows: Sequence[Result]) -> Table:
    found = {name for result in of_rows for name in result.rates}
    names = [name for name in columns() if name in found]
    others = [name for name in names if name not in (OURS, PACKED, CUDNN, CUDNN_PLAIN)]
    derived = results.shown(
        [
            *((f"{OURS} / {name}", [number(result.ratio(name), 2) for result in of_rows]) for name in others),
            (f"{OURS} / FA3 scaled", [number(result.fa3_scaled_ratio, 2) for result in of_rows]),
            (f"{OURS} / goal", [number(result.goal_ratio, 2) for result in of_rows]),
            ("of matmul", [percent(result.share_of_matmul) for result in of_rows]),
            ("difference", [small(result.difference) for result in of_rows]),
        ]
    )
    return Table(
        (title, *names, *(header for header, _ in derived)),
        tuple(
            (result.row.name, *(cell(result, name) for name in names), *(cells[index] for _, cells in derived))
            for index, result in enumerate(of_rows)
        ),
    )


def columns() -> tuple[str, ...]:
    """All names that a result can have, in the order of the tables."""
    return (OURS, PACKED, DETERMINISTIC, *(contestant.name for contestant in everyone()), PLAIN, CUDNN_PLAIN)


def _target(specs: Sequence[AttentionSpec], arch: str | None) -> str:
    """What the kernels are for. Raises what `fagen.load` raises where it raises it for every spec."""
    import torch

    errors = []
    for spec in specs:
        try:
            kernel = load(spec, arch).kernel(torch.device("cuda", torch.cuda.current_device()))
        except FagenError as error:
            errors.append(error)
        else:
            return str(kernel.arch.name)
    raise errors[0]


def load(spec: AttentionSpec, arch: str | None) -> Any:
    """`fagen.load` of a kernel for the GPU."""
    from fagen import ops

    return ops.load(spec, arch=arch, emulate=False)


def _ours(
    spec: AttentionSpec, arch: str | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], Any]:
    attention = load(spec, arch)
    values = {"softcap": SOFTCAP} if spec.softcap else {}
    return lambda: attention(q, k, v, **values)


def _ours_packed(
    spec: AttentionSpec, arch: str | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], Any]:
    import torch

    attention = load(spec.model_copy(update={"varlen": True}), arch)
    batch, seqlen = q.shape[:2]
    begins = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * seqlen
    named = {"cu_seqlens_q": begins, "cu_seqlens_k": begins, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen}
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    return lambda: attention(*rows, **named).view_as(q)


def _makers(row: Row, against: Sequence[Contestant], arch: str | None) -> dict[str, Callable[..., Callable[[], Any]]]:
    """Who takes part in a row: by name, what makes the call of its forward."""

    def of(contestant: Contestant, softcap: float | None) -> Callable[..., Callable[[], Any]]:
        return lambda q, k, v: contestant.make(q, k, v, row.causal, softcap)

    makers: dict[str, Callable[..., Callable[[], Any]]] = {OURS: lambda *qkv: _ours(row.spec, arch, *qkv)}
    if not (row.softcap or row.backward):
        makers[PACKED] = lambda *qkv: _ours_packed(row.spec, arch, *qkv)
    if row.backward:
        deterministic = row.spec.model_copy(update={"deterministic": True})
        makers[DETERMINISTIC] = lambda *qkv: _ours(deterministic, arch, *qkv)
    softcap = SOFTCAP if row.softcap else None
    makers |= {other.name: of(other, softcap) for other in against if other.softcap or not row.softcap}
    if row.softcap:
        makers[PLAIN] = lambda *qkv: _ours(replace(row, softcap=False).spec, arch, *qkv)
        makers.update((CUDNN_PLAIN, of(other, None)) for other in against if other.name == CUDNN)
    return makers


def first_calls(
    makers: Mapping[str, Callable[..., Callable[[], Any]]], qkv: tuple[torch.Tensor, ...]
) -> tuple[dict[str, Callable[[], Any]], dict[str, torch.Tensor], dict[str, str]]:
    """The call of each, what its first call returned, and of those that failed why.

    A call computes the output, or, for tensors that need gradients, those gradients; then it returns that of q.
    """
    import torch

    calls: dict[str, Callable[[], Any]] = {}
    outputs: dict[str, torch.Tensor] = {}
    failures: dict[str, str] = {}
    for name, make in makers.items():
        try:
            call = make(*qkv)
            if qkv[0].requires_grad:
                call = _backward(call(), qkv)
            output = call()
            if output.is_cuda:
                torch.cuda.synchronize()
        except Exception as error:
            failures[name] = first_line(error)
        else:
            calls[name], outputs[name] = call, output
    return calls, outputs, failures


def _matmul() -> Callable[[], Any]:
    """The product of two large bf16 matrices through cuBLAS."""
    import torch

    generator = torch.Generator("cuda").manual_seed(2)
    shape = (MATMUL_SIZE, MATMUL_SIZE)
    a, b = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=c)


def differences(
    outputs: Mapping[str, torch.Tensor], ours: Sequence[str], others: Sequence[str]
) -> tuple[float | None, str | None]:
    """How far the outputs of `ours` are from another's, the largest, and whose that is: the first of `others` there."""
    import torch

    other = next((name for name in others if name in outputs), None)
    found = [outputs[name].float() for name in ours if name in outputs]
    if other is None or not found:
        return None, None
    expected = outputs[other].float()
    norm = torch.linalg.vector_norm
    # Of tensors, not of floats: where one is NaN, so is the largest.
    return float(torch.stack([norm(output - expected) for output in found]).max() / norm(expected)), other


def _default_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """PyTorch's SDPA with the backend that it chooses."""
    import torch

    q1, k1, v1 = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: torch.nn.functional.scaled_dot_product_attention(q1, k1, v1)


def _forward_and_backward(
    forward: Callable[[], Any], inputs: Sequence[torch.Tensor], d_o: torch.Tensor
) -> Callable[[], Any]:
    import torch

    return lambda: torch.autograd.grad(forward(), inputs, d_o)


def _backward(o: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """A call that computes the gradients of `inputs` through `o`; it returns that of q."""
    import torch

    generator = torch.Generator(o.device).manual_seed(1)
    d_o = torch.randn(o.shape, generator=generator, device=o.device, dtype=o.dtype)
    return lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True)[0]


def first_line(error: Exception) -> str:
    """An exception for one line of text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
