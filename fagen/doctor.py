"""What this machine can build and run, and what to do about what it lacks."""

from __future__ import annotations

import subprocess
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Literal, TypeVar

from fagen import bundle, cache, env, toolchain
from fagen.arch import KIB, Arch, capabilities, for_capability, why
from fagen.driver import Gpu, driver_version, gpus
from fagen.errors import FagenError

T = TypeVar("T")
Status = Literal["ok", "missing", "not needed", "problem"]

OLDEST_TORCH = (2, 9)
INSTALL_CUDA = "pip install 'fagen[cuda]'"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for. `advice` says what to do, and is empty where there is nothing to do."""

    name: str
    status: Status
    found: str
    advice: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and what follows: whether kernels can be compiled for a GPU, run on one, be it from bundles only,
    and run on the CPU."""

    findings: tuple[Finding, ...]
    builds_cuda: bool
    runs_cuda: bool
    runs_cpu: bool

    @property
    def ok(self) -> bool:
        """Whether a kernel can be built and run in some way."""
        return self.runs_cuda or self.runs_cpu

    @property
    def summary(self) -> str:
        """One sentence on what works here."""
        if self.runs_cuda and not self.builds_cuda:
            emulated = ", and emulated on the CPU" if self.runs_cpu else ""
            return f"kernels of bundles run on the GPU{emulated}; none can be built for a GPU"
        if self.runs_cuda and self.runs_cpu:
            return "kernels are built and run on the GPU, and emulated on the CPU"
        if self.runs_cuda:
            return "kernels are built and run on the GPU"
        if self.runs_cpu and self.builds_cuda:
            return "kernels are built for GPUs, and run emulated on the CPU"
        if self.runs_cpu:
            return "kernels run emulated on the CPU; none can be built for a GPU"
        if self.builds_cuda:
            return "kernels are built for GPUs, but cannot run here"
        return "no kernel can be built and run here"


def diagnose() -> Diagnosis:
    """Looks for everything that fagen uses, without torch or cuda-bindings. Raises nothing for what is amiss."""
    cards = gpus()
    arch = _gpu_arch(cards)
    nvrtc = _try("NVRTC", toolchain.find_nvrtc, lambda it: f"{it.version}, {it.library}", INSTALL_CUDA)
    nvcc = _try(
        "nvcc",
        toolchain.find_nvcc,
        lambda it: f"{it.version}, {it.executable}",
        "install a CUDA toolkit, then set CUDA_HOME or FAGEN_NVCC",
    )
    # One of the two is enough, unless the other is asked for by name.
    if nvrtc.ok and nvcc.status == "missing" and _asked_compiler() != "nvcc":
        nvcc = Finding("nvcc", "not needed", "not found; NVRTC does the work")
    if nvcc.ok and nvrtc.status == "missing" and _asked_compiler() != "nvrtc":
        nvrtc = Finding("NVRTC", "not needed", "not found; nvcc does the work", f"it compiles faster: {INSTALL_CUDA}")
    compiler = _cuda_compiler(arch)
    driver, gpu = _driver(), _gpu(cards, arch)
    host = _try("host compiler", toolchain.find_host_compiler, lambda it: it.version, "")
    ninja = _ninja()
    torch = _torch(bool(cards))
    bindings = _bindings(bool(cards))
    store, bundles = _cache(), _bundles(arch)

    builds_cuda = compiler.ok and store.ok
    return Diagnosis(
        findings=(nvrtc, nvcc, compiler, driver, gpu, bindings, host, ninja, torch, store, *bundles),
        builds_cuda=builds_cuda,
        runs_cuda=(builds_cuda or any(found.ok for found in bundles))
        and gpu.ok
        and bindings.ok
        and torch.ok
        and not _torch_is_for_cpus(),
        runs_cpu=host.ok and ninja.ok and torch.ok and store.ok,
    )


@dataclass(frozen=True)
class Architecture:
    """What cards of one compute capability run.

    shared_kib: that a block may have, KiB. made_of: what the kernels are made of. why: why this target. compiles:
    whether the compiler here knows it, None where there is none.
    """

    capability: str
    generation: str
    target: str
    family: str
    shared_kib: int
    made_of: str
    why: str
    compiles: bool | None


def architectures() -> tuple[Architecture, ...]:
    """What cards of each compute capability run, oldest first."""
    try:
        compiler: toolchain.Compiler | None = toolchain.find_cuda_compiler()
    except FagenError:
        compiler = None
    rows = []
    for capability in capabilities():
        arch = for_capability(capability)
        rows.append(
            Architecture(
                capability=".".join(map(str, capability)),
                generation=arch.multiprocessor.generation,
                target=arch.name,
                family=arch.family,
                shared_kib=arch.smem_limit // KIB,
                made_of=arch.made_of,
                why=why(capability),
                compiles=None if compiler is None else _compiles(compiler, arch),
            )
        )
    return tuple(rows)


def _compiles(compiler: toolchain.Compiler, arch: Arch) -> bool:
    try:
        compiler.check(arch)
    except FagenError:
        return False
    return True


def _asked_compiler() -> str | None:
    """The CUDA compiler that the environment asks for, None where it asks for none or for nonsense."""
    try:
        return env.compiler() or ("nvcc" if env.nvcc() else None)
    except FagenError:
        return None


def _try(name: str, find: Callable[[], T | None], describe: Callable[[T], str], advice: str) -> Finding:
    try:
        it = find()
    except FagenError as error:
        return Finding(name, "missing", "not found", str(error))
    return Finding(name, "missing", "not found", advice) if it is None else Finding(name, "ok", describe(it))


def _cuda_compiler(arch: Arch | None) -> Finding:
    """The compiler that `fagen build` takes, tried on the card's architecture where there is a card."""
    name = "CUDA compiler"
    try:
        compiler = toolchain.find_cuda_compiler()
    except FagenError as error:
        return Finding(name, "missing", "none", str(error))
    what = f"{'NVRTC' if compiler.name == 'nvrtc' else compiler.name} {compiler.version}"
    if arch is None:
        return Finding(name, "ok", what)
    try:
        compiler.check(arch)
    except FagenError as error:
        return Finding(name, "problem", what, str(error))
    return Finding(name, "ok", f"{what}, serves {arch.name}")


def _driver() -> Finding:
    version = driver_version()
    if version is None:
        return Finding("driver", "not needed", "none", "to run on a GPU, install NVIDIA's driver")
    return Finding("driver", "ok", f"supports CUDA {version[0]}.{version[1]}")


def _gpu(cards: list[Gpu], arch: Arch | None) -> Finding:
    if not cards:
        if driver_version() is None:
            return Finding("GPU", "not needed", "none", "kernels run emulated on the CPU: fagen check --emulate")
        return Finding("GPU", "problem", "the driver shows none", "see nvidia-smi and CUDA_VISIBLE_DEVICES")
    found = "; ".join(f"{card.name} ({card.capability[0]}.{card.capability[1]})" for card in cards)
    if arch is None:
        return Finding("GPU", "problem", found, "older than every architecture that fagen builds for")
    return Finding("GPU", "ok", f"{found}, kernels for {arch.name}: {arch.made_of}")


def _gpu_arch(cards: list[Gpu]) -> Arch | None:
    if not cards:
        return None
    try:
        return for_capability(cards[0].capability)
    except FagenError:
        return None


def _ninja() -> Finding:
    try:
        path = toolchain.find_ninja()
        done = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=30, check=True)
    except FagenError as error:
        return Finding("ninja", "missing", "not found", str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("ninja", "problem", f"{path} does not run", f"pip install --force-reinstall ninja ({error})")
    return Finding("ninja", "ok", f"{done.stdout.strip()}, {path}")


def _torch(gpu: bool) -> Finding:
    version = _installed("torch")
    oldest = ".".join(map(str, OLDEST_TORCH))
    if version is None:
        advice = f"pip install torch, {oldest} or newer: needed to run kernels, not to build them"
        return Finding("PyTorch", "missing", "not installed", advice)
    numbers = version.split("+")[0].split(".")
    if tuple(int(number) for number in numbers[:2]) < OLDEST_TORCH:
        return Finding("PyTorch", "problem", version, f"too old: pip install 'torch>={oldest}'")
    if gpu and _torch_is_for_cpus():
        advice = "this build cannot use the GPU: install one with CUDA (pytorch.org, Get Started)"
        return Finding("PyTorch", "ok", version, advice)
    return Finding("PyTorch", "ok", version)


def _torch_is_for_cpus() -> bool:
    return (_installed("torch") or "").endswith("+cpu")


def _bindings(gpu: bool) -> Finding:
    version = _installed("cuda-bindings")
    if version is not None:
        return Finding("cuda-bindings", "ok", version)
    if gpu:
        return Finding("cuda-bindings", "missing", "not installed", f"needed to run on the GPU: {INSTALL_CUDA}")
    return Finding("cuda-bindings", "not needed", "not installed; only a GPU needs it")


def _cache() -> Finding:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            directory = cache.build_dir("emulate")
        except FagenError as error:
            return Finding("cache", "problem", str(cache.cache_dir()), str(error))
    if caught:
        return Finding("cache", "ok", f"{directory}, writable", str(caught[0].message))
    return Finding("cache", "ok", f"{directory}, writable")


def _bundles(arch: Arch | None) -> list[Finding]:
    """One finding where there are bundles, or should be."""
    name = "bundles"
    try:
        found = bundle.search()
    except FagenError as error:
        return [Finding(name, "problem", "not usable", str(error))]
    if not found:
        return []
    served = sorted({entry.arch for each in found for entry in each.entries})
    count = sum(len(each.entries) for each in found)
    kernels = f"{count} kernel{'' if count == 1 else 's'}"
    what = f"{kernels} for {', '.join(served)} in {', '.join(str(each.path) for each in found)}"
    if arch is not None and arch.name not in served:
        return [
            Finding(name, "problem", what, f"none is for this card: make one with `fagen bundle --arch {arch.name}`")
        ]
    return [Finding(name, "ok", what)]


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
