"""Is a kernel right? One call of it beside the float64 reference, judged by the budgets of SEMANTICS.md.

`Case` names one call (a spec, shapes, values, memory layout) and makes its inputs; tests/cases.py is a table of them.
`compare_o` and `compare_lse` judge outputs, `check` does the whole: build, run, compare, time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fagen import reference
from fagen.errors import LaunchError, SpecError
from fagen.mods import CallContext
from fagen.spec import AttentionSpec

Layout = Literal["contiguous", "transposed", "sliced", "expanded"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# SEMANTICS.md, Accuracy: ||x - ref|| / ||ref|| of o on unit-normal inputs, and what lse may be off by.
OUTPUT_BUDGET = {"bf16": 2.5e-3, "fp16": 4e-4}
LSE_ABSOLUTE, LSE_RELATIVE = 1e-4, 1e-6
FLASH_FACTOR = 1.2

# One element may be off by this many budgets of its own size plus its row's root mean square. Rounding errors of P and
# o are normal with less than half a budget of that, so a correct kernel stays below; a lost or doubled key does not.
ELEMENT_FACTOR = 10.0

# What may underflow besides: P, rounded to 2^-25 in fp16 and flushed below 2^-126 in bf16, over a few keys and rescaled
# after dropout. It shows where dropout keeps only keys of hardly any weight.
UNDERFLOW = {torch.float16: 1e-6, torch.bfloat16: 1e-30}

FIRST_VALUES = 4


@dataclass(frozen=True)
class Inputs:
    """Tensors and keyword arguments of one call."""

    q: Tensor  # (B, Sq, Hq, D)
    k: Tensor  # (B, Sk, Hk, D)
    v: Tensor  # (B, Sk, Hk, Dv)
    call: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of one kernel: a row of the table that tests, `fagen check` and `fagen bench` share.

    `window`, `dropout_p` and `values` (by the arguments of the score modifications: a number, or a function of the case
    and a generator that makes one) may be left out for features that the spec has: then the example of the modification
    stands in. `large` marks a case that takes too long emulated.
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
        if self.seed:
            parts.append(f"seed{self.seed}")
        return "-".join(parts)

    def inputs(self, device: torch.device | str = "cpu") -> Inputs:
        """Unit-normal q, k, v in the spec's dtype, the same on every device, and the arguments of the call."""
        generator = torch.Generator().manual_seed(self.seed)

        def tensor(seqlen: int, heads: int, dim: int) -> Tensor:
            x = torch.randn(self.batch, seqlen, heads, dim, generator=generator)
            return lay_out(x.to(device, DTYPES[self.spec.dtype]), self.layout)

        q = tensor(self.seqlen_q, self.heads, self.spec.head_dim)
        k = tensor(self.seqlen_k, self.heads_k, self.spec.head_dim)
        v = tensor(self.seqlen_k, self.heads_k, self.spec.dim_v)
        call: dict[str, Any] = {}
        if self.softmax_scale is not None:
            call["softmax_scale"] = self.softmax_scale
        if self.spec.window or self.window is not None:
            call["window"] = self.window or _example_window(self)
        if self.spec.dropout or self.dropout_p is not None:
            call["dropout_p"] = 0.2 if self.dropout_p is None else self.dropout_p
            call["seed"] = self.seed
        context = CallContext(
            batch=self.batch,
            heads_q=self.heads,
            softmax_scale=self.softmax_scale or self.spec.head_dim**-0.5,
            device=torch.device("cpu"),
        )
        examples = {mod.argument: mod.example(context) for mod in self.spec.mods}
        for name, given in (examples | dict(self.values)).items():
            value = given(self, generator) if callable(given) else given
            call[name] = value.to(device) if isinstance(value, Tensor) else value
        return Inputs(q, k, v, call)

    def reference(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """o (B, Sq, Hq, Dv) and lse (B, Hq, Sq) in float64."""
        o, lse = reference.attention(inputs.q, inputs.k, inputs.v, causal=self.spec.causal, **inputs.call)
        return o, lse


def alibi_slopes_per_batch(case: Case, generator: torch.Generator) -> Tensor:
    """Slopes (B, Hq), uniform in [0, 1)."""
    return torch.rand(case.batch, case.heads, generator=generator)


def _example_window(case: Case) -> tuple[int, int]:
    return case.seqlen_k // 3, case.seqlen_k // 5


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
    """The element that is furthest off for what it may be; `dim` is None for lse."""

    batch: int
    head: int
    row: int
    dim: int | None
    value: float
    reference: float


@dataclass(frozen=True)
class Comparison:
    """One output beside its reference. `error` and `budget`: relative norm for o, largest absolute error for lse (whose
    budget grows with the magnitude, see `compare_lse`); `elementwise` is the worst element's error over its own bound.
    """

    error: float
    budget: float
    elementwise: float
    worst: Worst | None  # None where there are no elements
    passed: bool


def compare_o(o: Tensor, expected: Tensor, budget: float) -> Comparison:
    """o against its reference, both (B, S, H, Dv): ||o - ref|| / ||ref|| within `budget`, and every element within
    ELEMENT_FACTOR budgets of its own magnitude plus the root mean square of its row, and UNDERFLOW. A row that is zero
    in the reference, as one that sees nothing, must be exactly zero. NaN never passes."""
    value = _same_shape("o", o, expected)
    expected = expected.double()
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
    """lse against its reference, both (B, H, S): every element within 1e-4, or 1e-6 of its magnitude where that is
    more; -inf exactly where the reference has it. NaN never passes."""
    value = _same_shape("lse", lse, expected)
    expected = expected.double()
    if not value.numel():
        return Comparison(0.0, LSE_ABSOLUTE, 0.0, None, True)
    # inf - inf is NaN: equal elements differ by 0, and one infinity against a number by infinity.
    difference = (value - expected).abs().masked_fill(value == expected, 0.0)
    bound = (LSE_RELATIVE * expected.abs()).clamp(min=LSE_ABSOLUTE).masked_fill(torch.isinf(expected), LSE_ABSOLUTE)
    elementwise, (b, h, i) = _worst(difference, bound)
    worst = Worst(b, h, i, None, float(value[b, h, i]), float(expected[b, h, i]))
    return Comparison(float(difference[b, h, i]), float(bound[b, h, i]), elementwise, worst, elementwise <= 1)


def flash_error(case: Case, inputs: Inputs, expected: Tensor) -> float | None:
    """||x - ref|| / ||ref|| of PyTorch's own flash kernel on these inputs; None without a GPU or where SDPA's flash
    backend cannot express the call: it has no modifications, windows or such dropout, one head dim, and aligns causal
    masks to the top left."""
    spec = case.spec
    expressible = not (spec.mods or spec.window or spec.dropout) and spec.dim_v == spec.head_dim
    if spec.causal and case.seqlen_q != case.seqlen_k:
        expressible = False
    if max(case.batch, case.heads) > 65535:  # its launch puts each in a grid dimension of its own
        expressible = False
    if not expressible or inputs.q.device.type != "cuda" or not expected.numel() or not case.seqlen_k:
        return None
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group = case.heads // case.heads_k
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        o = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=spec.causal, scale=inputs.call.get("softmax_scale")
        )
    difference = float(torch.linalg.vector_norm(o.transpose(1, 2).double() - expected))
    return _ratio(difference, float(torch.linalg.vector_norm(expected)))


@dataclass(frozen=True)
class CheckResult:
    """What `check` found. The fields of `shape` are batch, heads, heads_k, seqlen_q and seqlen_k."""

    spec: AttentionSpec
    slug: str  # of the kernel
    arch: str
    device: str  # the card's name, or "CPU (emulated)"
    emulated: bool
    shape: dict[str, int]
    seed: int
    o: Comparison
    lse: Comparison
    flash_error: float | None  # what PyTorch's flash kernel loses on these inputs; None where it cannot say
    first_values: list[float]  # of o, from the first element on
    first_reference: list[float]
    seconds: float  # one call: the median of several on a GPU, without the build
    smem_bytes: int  # dynamic shared memory a block
    passed: bool

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON can hold them: numbers that are not finite as strings."""
        fields = asdict(self) | {"spec": self.spec.model_dump(mode="json")}
        return {name: _jsonable(value) for name, value in fields.items()}


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
    """Builds the kernel of `spec`, runs it on the GPU if there is one, else emulated, and compares with float64.

    The outputs are filled with NaN before the launch. Sizes that are not given: 2 batch entries, twice as many query
    heads as key heads, and lengths that are no multiple of a tile, larger on a GPU than emulated.

    Raises SpecError for sizes that cannot be, and what `fagen.load` raises.
    """
    from fagen.ops import load

    emulated = not torch.cuda.is_available() if emulate is None else emulate
    device = torch.device("cpu") if emulated else torch.device("cuda", torch.cuda.current_device())
    case = _default_case(spec, emulated, batch, heads, heads_k, seqlen_q, seqlen_k, seed)
    inputs = case.inputs(device)
    attention = load(spec, arch=arch, emulate=emulated)

    def call(poison: bool = False) -> Any:
        return attention(inputs.q, inputs.k, inputs.v, return_lse=True, _poison=poison, **inputs.call)

    start = time.perf_counter()
    o, lse = call(poison=True)
    seconds = time.perf_counter() - start if emulated else _seconds_on_gpu(call)

    expected_o, expected_lse = case.reference(inputs)
    flash = flash_error(case, inputs, expected_o)
    budget = max(OUTPUT_BUDGET[spec.dtype], FLASH_FACTOR * (flash or 0.0))
    result_o, result_lse = compare_o(o, expected_o, budget), compare_lse(lse, expected_lse)
    kernel = attention.kernel(device)
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
        flash_error=flash,
        first_values=o.flatten()[:FIRST_VALUES].tolist(),
        first_reference=expected_o.flatten()[:FIRST_VALUES].tolist(),
        seconds=seconds,
        smem_bytes=kernel.smem_bytes,
        passed=result_o.passed and result_lse.passed,
    )


def _default_case(
    spec: AttentionSpec,
    emulated: bool,
    batch: int | None,
    heads: int | None,
    heads_k: int | None,
    seqlen_q: int | None,
    seqlen_k: int | None,
    seed: int,
) -> Case:
    """The case that `check` runs: what is not given follows from what is."""
    if heads is None:
        heads = 2 if heads_k is None else 2 * heads_k
    if heads_k is None:
        heads_k = heads // 2 if heads % 2 == 0 else heads
    length = 150 if emulated else 2000
    seqlen_q = length if seqlen_q is None else seqlen_q
    seqlen_k = seqlen_q + 20 if seqlen_k is None else seqlen_k
    batch = 2 if batch is None else batch
    for name, size in (("batch", batch), ("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k)):
        if size < 0:
            raise SpecError(f"{name}={size} must not be negative")
    if heads < 1 or heads_k < 1 or heads % heads_k:
        raise SpecError(f"heads={heads} must be a positive multiple of heads_k={heads_k}")
    return Case(spec=spec, batch=batch, heads=heads, heads_k=heads_k, seqlen_q=seqlen_q, seqlen_k=seqlen_k, seed=seed)


def _seconds_on_gpu(call: Callable[[], Any], calls: int = 10) -> float:
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


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
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
