"""How fast kernels are: beside PyTorch's own on the same tensors, in turns, so that a drift of the clocks meets
all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fagen.errors import ToolchainError
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    import torch

TOKENS = 16384  # batch * seqlen of every row
WIDTH = 2048  # heads * head_dim of every row
SOFTCAP = 50.0

OURS, FA2, CUDNN, PLAIN = "fagen", "FA2", "cuDNN", "without softcap"


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
        length = f"{self.seqlen // 1024}k" if self.seqlen % 1024 == 0 else str(self.seqlen)
        return f"d{self.head_dim} {'causal' if self.causal else 'full'} {length}{' softcap' if self.softcap else ''}"

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


@dataclass(frozen=True)
class Result:
    """TFLOP/s of each contestant, None for one that cannot do the row. `difference`: ||fagen - FA2|| / ||FA2||."""

    row: Row
    tflops: Mapping[str, float | None]
    difference: float | None

    def ratio(self, other: str) -> float | None:
        """How many times as fast as `other` fagen is."""
        ours, theirs = self.tflops.get(OURS), self.tflops.get(other)
        return ours / theirs if ours and theirs else None


@dataclass(frozen=True)
class SpeedReport:
    """All results. `host_us`: microseconds of host time a call, B=1, S=128, d128, as `host_times` gives them."""

    card: str
    arch: str
    torch: str
    driver: str
    results: tuple[Result, ...]
    host_us: Mapping[str, float]


def rows() -> tuple[Row, ...]:
    """The rows of the forward table; those with softcap run against the same kernel without it."""
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
    arch: str | None = None,
    samples: int = 30,
    on_done: Callable[[Row], None] = lambda row: None,
) -> SpeedReport:
    """Measures `chosen` on the current GPU: medians of `samples` timings by CUDA events.

    Raises ToolchainError without a GPU that PyTorch can use, and what `fagen.load` raises.
    """
    import torch

    if not torch.cuda.is_available():
        raise ToolchainError("no GPU that PyTorch can use: this measures on one (see fagen doctor)")
    results = []
    for row in chosen:
        results.append(measure(row, arch=arch, samples=samples))
        on_done(row)
    from fagen.driver import driver_version

    driver = driver_version()
    return SpeedReport(
        card=torch.cuda.get_device_name(),
        arch=_load(chosen[0].spec, arch).kernel(torch.device("cuda", torch.cuda.current_device())).arch.name,
        torch=torch.__version__,
        driver="unknown" if driver is None else f"CUDA {driver[0]}.{driver[1]}",
        results=tuple(results),
        host_us=host_times(arch),
    )


def measure(row: Row, *, arch: str | None = None, samples: int = 30) -> Result:
    """One row on the current GPU."""
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    shape = (row.batch, row.seqlen, row.heads, row.head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for tensor in (q, k, v):
        tensor.requires_grad_(row.backward)
    contestants = {OURS: _ours(row.spec, arch, q, k, v)}
    if row.softcap:
        contestants[PLAIN] = _ours(replace(row, softcap=False).spec, arch, q, k, v)
    else:
        contestants |= _sdpa(q, k, v, row.causal)
    if row.backward:
        contestants = {name: _backward(name, forward, (q, k, v)) for name, forward in contestants.items()}
    outputs = {name: output for name, call in contestants.items() if (output := _first_call(name, call)) is not None}
    seconds = take_turns({name: contestants[name] for name in outputs}, samples)
    difference = None
    if FA2 in outputs:
        expected = outputs[FA2].float()
        difference = float(
            torch.linalg.vector_norm(outputs[OURS].float() - expected) / torch.linalg.vector_norm(expected)
        )
    tflops = {name: row.flop / seconds[name] / 1e12 if name in seconds else None for name in contestants}
    return Result(row, tflops, difference)


def take_turns(contestants: Mapping[str, Callable[[], Any]], samples: int) -> dict[str, float]:
    """Median seconds of a call of each, by CUDA events: `samples` rounds of one call each, after three to warm up."""
    import torch

    new_event: Any = torch.cuda.Event
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in contestants}
    for round_number in range(samples + 3):
        for name, call in contestants.items():
            start, end = new_event(enable_timing=True), new_event(enable_timing=True)
            start.record()
            call()
            end.record()
            if round_number >= 3:
                events[name].append((start, end))
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


def markdown(report: SpeedReport, *, date: str, command: str) -> str:
    """The report as a section of BENCHMARKS.md."""
    parts = [
        f"{report.card}, {date}, kernels for {report.arch}, PyTorch {report.torch}, driver for {report.driver}: "
        f"`{command}`",
        f"bf16, {TOKENS} tokens, heads * d = {WIDTH}, TFLOP/s, medians of CUDA-event timings taken in turns.",
    ]
    plain = [result for result in report.results if not result.row.softcap]
    capped = [result for result in report.results if result.row.softcap]
    direction = "backward" if report.results[0].row.backward else "forward"
    if plain:
        parts.append(_markdown_table(direction, plain, (FA2, CUDNN)))
    if capped:
        parts.append(_markdown_table(f"{direction}, cap {SOFTCAP:g}", capped, (PLAIN,)))
    host = ", ".join(f"{name} {us:.1f} us" for name, us in report.host_us.items())
    return "\n\n".join([*parts, f"Host time of one call, B=1, S=128: {host}"])


def number(value: float | None, digits: int = 0) -> str:
    """A cell of a table; "-" where there is no number."""
    return "-" if value is None else f"{value:.{digits}f}"


def _markdown_table(title: str, results: Sequence[Result], others: Sequence[str]) -> str:
    header = (title, OURS, *others, *(f"{OURS} / {name}" for name in others))
    cells = [
        (
            result.row.name,
            *(number(result.tflops.get(name)) for name in (OURS, *others)),
            *(number(result.ratio(name), 2) for name in others),
        )
        for result in results
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ("---", *("---:" for _ in header[1:])), *cells))


def _load(spec: AttentionSpec, arch: str | None) -> Any:
    from fagen.ops import load

    return load(spec, arch=arch, emulate=False)


def _ours(
    spec: AttentionSpec, arch: str | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], Any]:
    attention = _load(spec, arch)
    values = {"softcap": SOFTCAP} if spec.softcap else {}
    return lambda: attention(q, k, v, **values)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Callable[[], Any]]:
    """PyTorch's backends on the same memory; each takes (B, H, S, D) views of it as they are."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q1, k1, v1 = (x.transpose(1, 2) for x in (q, k, v))

    def with_backend(backend: SDPBackend) -> Callable[[], Any]:
        def call() -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q1, k1, v1, is_causal=causal).transpose(1, 2)

        return call

    return {FA2: with_backend(SDPBackend.FLASH_ATTENTION), CUDNN: with_backend(SDPBackend.CUDNN_ATTENTION)}


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


def _backward(name: str, forward: Callable[[], Any], inputs: tuple[torch.Tensor, ...]) -> Callable[[], Any]:
    """A call that computes the gradients of `inputs`, after one forward; it returns that of q."""
    import torch

    o = _first_call(name, forward)
    if o is None:
        return lambda: _refuse(name)
    generator = torch.Generator("cuda").manual_seed(1)
    d_o = torch.randn(o.shape, generator=generator, device="cuda", dtype=o.dtype)
    return lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True)[0]


def _refuse(name: str) -> None:
    raise RuntimeError(f"{name} does not serve this row")


def _first_call(name: str, call: Callable[[], Any]) -> Any:
    """Output of the first call; None where a backend of PyTorch does not serve the row. Ours must."""
    if name in (OURS, PLAIN):
        return call()
    try:
        return call()
    except RuntimeError:
        return None
