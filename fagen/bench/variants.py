"""What variants of the kernel cost and how far they are from float64: each is compiled alone, for a GPU where there is
a compiler for it, and checked as `fagen check` does, on the GPU if that can run it, else emulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fagen import build, toolchain
from fagen.arch import Arch, resolve
from fagen.bench.results import Table, number, percent, section, small
from fagen.errors import FagenError, SpecError, ToolchainError
from fagen.plan import plan
from fagen.spec import AttentionSpec, feature_names
from fagen.tuned import plan_here

# A feature that no kernel has alone, and what it needs.
_NEEDS = {"paged": {"split_kv": True}, "deterministic": {"backward": True}}


@dataclass(frozen=True)
class Row:
    """One variant."""

    spec: AttentionSpec

    @property
    def name(self) -> str:
        """As the tables call it, "d128 fp16 causal softcap"."""
        spec = self.spec
        dims = f"d{spec.head_dim}" + (f"/{spec.dim_v}" if spec.head_dim_v is not None else "")
        dtype = () if spec.dtype == "bf16" else (spec.dtype,)
        return " ".join([dims, *dtype, *spec.features])


@dataclass(frozen=True)
class Kernel:
    """One kernel of a variant. `seconds`: of its compiler; registers and spills, in bytes, are a thread's and unknown
    where it was compiled for the CPU; `shared_memory`: bytes of a block; `size`: bytes of the artifact."""

    kind: str
    seconds: float
    registers: int | None
    spills: int | None
    shared_memory: int
    size: int


@dataclass(frozen=True)
class Error:
    """How far one result, "o", "lse", "dq", "dk" or "dv", is from float64, and what it may be off by: ||x - ref|| /
    ||ref||, for lse the largest absolute error. `flash`: what PyTorch's own flash kernel loses, where it can say."""

    name: str
    error: float
    budget: float
    flash: float | None
    passed: bool

    @property
    def share(self) -> float:
        """The error over its budget; infinite for one that is not a number."""
        return math.inf if math.isnan(self.error) or not self.budget else self.error / self.budget


@dataclass(frozen=True)
class Variant:
    """What was found of a row; `failure` has the reason where it could not be built or run."""

    row: Row
    kernels: tuple[Kernel, ...] = ()
    errors: tuple[Error, ...] = ()
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None and all(error.passed for error in self.errors)

    @property
    def seconds(self) -> float:
        """Of all its compilers, one after the other."""
        return sum(kernel.seconds for kernel in self.kernels)


@dataclass(frozen=True)
class VariantsReport:
    """All variants. `device` is where they ran, "CPU (emulated)" or a card's name; `compiler` what compiled them, the
    host compiler where there is none for a GPU."""

    device: str
    arch: str
    torch: str
    compiler: str
    variants: tuple[Variant, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """A line for each variant that could not be built or run."""
        return tuple(f"{one.row.name} failed: {one.failure}" for one in self.variants if one.failure is not None)


def rows() -> tuple[Row, ...]:
    """Head dims, types, and every feature that a kernel can have, alone and the most frequent together."""
    specs = [AttentionSpec(head_dim=head_dim) for head_dim in (64, 72, 128, 256)]
    specs.append(AttentionSpec(head_dim=128, dtype="fp16"))
    for name in feature_names():
        try:
            specs.append(AttentionSpec(head_dim=128, **{name: True}, **_NEEDS.get(name, {})))
        except SpecError:  # none has it yet
            continue
    specs.append(AttentionSpec(head_dim=128, causal=True, softcap=True))
    return tuple(Row(spec) for spec in specs)


def run(chosen: Sequence[Row], *, arch: str, on_done: Callable[[Row], None] = lambda row: None) -> VariantsReport:
    """Builds and checks `chosen` for `arch`. A variant that fails has its reason in place of figures.

    Raises ToolchainError where nothing can run them.
    """
    import torch

    target = resolve(arch)
    emulated = not (torch.cuda.is_available() and runs_on(target, torch.cuda.get_device_capability()))
    try:
        compiler: toolchain.Compiler = toolchain.find_cuda_compiler()
    except ToolchainError:
        if not emulated:
            raise
        compiler = toolchain.find_host_compiler()
    else:
        if emulated:
            toolchain.find_host_compiler()
    on_gpu = not isinstance(compiler, toolchain.HostCompiler)
    found = []
    for row in chosen:
        found.append(_measure(row, target, emulated, on_gpu))
        on_done(row)
    return VariantsReport(
        device="CPU (emulated)" if emulated else torch.cuda.get_device_name(),
        arch=target.name,
        torch=torch.__version__,
        compiler=compiler.identity,
        variants=tuple(found),
    )


def runs_on(arch: Arch, capability: tuple[int, int]) -> bool:
    """Whether a card of this compute capability runs what is built for `arch`: a cubin those of its major version from
    its minor one on, one of an architecture's own instructions that alone, PTX whatever is newer."""
    if arch.ptx_only:
        return capability >= arch.capability
    if arch.sm.endswith("a"):
        return capability == arch.capability
    return capability[0] == arch.capability[0] and capability >= arch.capability


def _measure(row: Row, arch: Arch, emulated: bool, on_gpu: bool) -> Variant:
    from fagen import check

    try:
        kernels = plan(row.spec, arch) if emulated else plan_here(row.spec, arch)  # as the check below loads them
        # Again and one at a time, whatever the cache has: seconds beside each other say something only so.
        artifacts = build.build(kernels, emulate=not on_gpu, jobs=1, force=True)
        result = check.check(row.spec, arch=arch.name, emulate=emulated)
    except FagenError as error:
        return Variant(row, failure=str(error).splitlines()[0])
    flash = {"o": result.flash_error, **result.flash_gradient_errors}
    compared = {"o": result.o, "lse": result.lse, **result.gradients}
    return Variant(
        row,
        tuple(
            Kernel(
                kind=kernel.kind,
                seconds=artifact.seconds,
                registers=None if artifact.resources is None else artifact.resources.registers,
                spills=None
                if artifact.resources is None
                else artifact.resources.spill_stores + artifact.resources.spill_loads,
                shared_memory=kernel.smem_bytes,
                size=artifact.size,
            )
            for kernel, artifact in zip(kernels, artifacts, strict=True)
        ),
        tuple(Error(name, one.error, one.budget, flash.get(name), one.passed) for name, one in compared.items()),
    )


def tables(report: VariantsReport) -> tuple[Table, ...]:
    """How far results are from float64, and what kernels cost."""
    names = list(dict.fromkeys(error.name for one in report.variants for error in one.errors))
    errors, kernels = [], []
    for one in report.variants:
        found = {error.name: error for error in one.errors}
        shares = [error.share for error in one.errors]
        cells = [small(found[name].error if name in found else None) for name in names]
        flash = next((error.flash for error in one.errors), None)
        worst = percent(max(shares)) if shares else "-"
        errors.append((one.row.name, *cells, small(flash), worst, "right" if one.passed else "wrong"))
        for kernel in one.kernels:
            kernels.append((f"{one.row.name}, {kernel.kind}", *_cells(kernel)))
    header = ("error to float64", *names, "o of PyTorch's flash", "worst of its budget", "result")
    costs = ("kernel", "seconds", "registers", "spills, B", "shared, KiB", "size, KiB")
    return Table(header, tuple(errors)), Table(costs, tuple(kernels))


def _cells(kernel: Kernel) -> tuple[str, ...]:
    return (
        number(kernel.seconds, 2),
        number(kernel.registers),
        number(kernel.spills),
        number(kernel.shared_memory / 1024, 1),
        number(kernel.size / 1024, 1),
    )


def legend(report: VariantsReport) -> list[str]:
    """What the columns mean, a phrase each."""
    return [
        "||x - ref|| / ||ref|| against float64 on the same rounded inputs, of lse the largest absolute error",
        "its budget: what fagen check allows, or 1.2 times what PyTorch's flash kernel loses on a GPU",
        f"seconds: of {report.compiler}, one kernel at a time",
    ]


def markdown(report: VariantsReport, *, date: str, command: str) -> str:
    """The report as a section of BENCHMARKS.md."""
    where = f"{report.device}, {date}, kernels for {report.arch}, PyTorch {report.torch}: `{command}`"
    return section(where, f"{'; '.join(legend(report))}.", tables(report))
