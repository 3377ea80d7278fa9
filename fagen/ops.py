"""`fagen.load` and the callable it returns: from tensors to a launch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, overload

import torch

from fagen import env, target
from fagen.arch import Arch, for_capability, resolve
from fagen.build import find_or_build
from fagen.cache import Artifact
from fagen.emulator import EmulatedKernel
from fagen.errors import LaunchError, SpecError
from fagen.launch import CudaKernel
from fagen.mods import LOG2E, MODS, CallContext, positive_float
from fagen.plan import KernelPlan, plan
from fagen.reference import keep_threshold
from fagen.spec import AttentionSpec

log = logging.getLogger("fagen")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ALIGNMENT = 16  # bytes of one asynchronous copy
MAX_SEQLEN = 2**30 - 1  # positions and window bounds are summed in 32 bits

# Loaded kernels by (directory of the artifact, device). The directory's name holds the digest, so that an edited
# template is another entry.
_KERNELS: dict[tuple[str, int | None], CudaKernel | EmulatedKernel] = {}


def load(spec: AttentionSpec, *, arch: str | None = None, emulate: bool | None = None) -> Attention:
    """The attention that `spec` describes, built if the cache lacks it.

    arch: "sm80", "sm90", ...; default the card's, without one FAGEN_ARCH or TORCH_CUDA_ARCH_LIST, without those sm80.
    emulate: True runs the kernel on the CPU, False on the GPU; None decides by where the tensors of a call are.

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
        self._launchers: dict[torch.device, _Launcher] = {}

    def prepare(self) -> None:
        """Builds and loads the kernel for the device that calls will most likely use."""
        if self.emulate or (self.emulate is None and not torch.cuda.is_available()):
            self._launcher(torch.device("cpu"))
        elif not torch.cuda.is_available():
            raise LaunchError("emulate=False, and PyTorch finds no GPU here: leave emulate out; fagen doctor says more")
        else:
            self._launcher(torch.device("cuda", torch.cuda.current_device()))

    def artifact(self, device: torch.device | str) -> Artifact:
        """What was built for tensors on `device`."""
        return self._launcher(torch.device(device)).artifact

    def kernel(self, device: torch.device | str) -> KernelPlan:
        """The plan of the kernel that runs for tensors on `device`."""
        return self._launcher(torch.device(device)).kernel

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
        seed: int | None = None,
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
        seed: int | None = None,
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
        seed: int | None = None,
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
        spec = self.spec
        batch, seqlen_q, heads_q, seqlen_k, heads_k = _check_tensors(spec, q, k, v)
        device = q.device
        scale = spec.head_dim**-0.5 if softmax_scale is None else positive_float("softmax_scale", softmax_scale)
        given = {"softcap": softcap, "alibi_slopes": alibi_slopes, **values_of_mods}
        call = CallContext(batch=batch, heads_q=heads_q, softmax_scale=scale, device=device)
        values: dict[str, Any] = {"softmax_scale_log2": scale * LOG2E}
        for mod in MODS:
            value = given.pop(mod.argument, None)
            _check_given(mod.name, mod.argument, getattr(spec, mod.name), value)
            if getattr(spec, mod.name):
                values |= mod.pack(value, call)
        if given:
            raise SpecError(f"a call takes no argument {', '.join(given)}")
        values |= _window(spec, window, seqlen_q, seqlen_k)
        values |= _dropout(spec, dropout_p, seed, device)

        launcher = self._launcher(device)
        o = torch.empty((batch, seqlen_q, heads_q, spec.dim_v), dtype=q.dtype, device=device)
        lse = torch.empty((batch, heads_q, seqlen_q), dtype=torch.float32, device=device)
        if _poison:
            o.fill_(math.nan)
            lse.fill_(math.nan)
        if lse.numel():
            q, k, v = (_aligned(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v)))
            values |= {"q": q, "k": k, "v": v, "o": o, "lse": lse}
            for name, tensor in (("q", q), ("k", k), ("v", v), ("o", o)):
                for index, dim in ((0, "batch"), (1, "row"), (2, "head")):
                    values[f"{name}_{dim}_stride"] = _stride(tensor, index)
            values |= {
                "seqlen_q": seqlen_q,
                "seqlen_k": seqlen_k,
                "heads_q": heads_q,
                "group_size": heads_q // heads_k,
            }
            launcher.run(batch * heads_q * -(-seqlen_q // launcher.kernel.tile.tile_m), values, (o, lse))
        return (o, lse) if return_lse else o

    def _launcher(self, device: torch.device) -> _Launcher:
        if device not in self._launchers:
            self._launchers[device] = self._load(device)
        return self._launchers[device]

    def _load(self, device: torch.device) -> _Launcher:
        if device.type == "cpu":
            if self.emulate is False:
                raise SpecError(
                    "the tensors are on the CPU and emulate=False; move them to a GPU, or leave emulate out"
                )
            return _Launcher.load(self._arch or _default_arch(), self.spec, None)
        if device.type != "cuda":
            raise SpecError(f"the tensors are on {device}; fagen runs on CUDA devices, and emulated on the CPU")
        if self.emulate:
            raise SpecError(f"the tensors are on {device} and emulate=True; move them to the CPU, or leave emulate out")
        capability = torch.cuda.get_device_capability(device)
        return _Launcher.load(self._arch or for_capability(capability), self.spec, device)


class _Launcher:
    """One built kernel on one device."""

    def __init__(self, kernel: KernelPlan, artifact: Artifact, loaded: CudaKernel | EmulatedKernel) -> None:
        self.kernel = kernel
        self.artifact = artifact
        self._loaded = loaded

    @classmethod
    def load(cls, arch: Arch, spec: AttentionSpec, device: torch.device | None) -> _Launcher:
        """Builds what is missing. `device=None` loads the emulated kernel."""
        (kernel,) = plan(spec, arch)
        (artifact,) = find_or_build([kernel], emulate=device is None)
        key = (str(artifact.directory), None if device is None else device.index)
        if key not in _KERNELS:
            if device is None:
                _KERNELS[key] = EmulatedKernel(artifact.binary, kernel.entry)
            else:
                _KERNELS[key] = CudaKernel(artifact.binary, kernel.entry, device.index, kernel.smem_bytes)
        return cls(kernel, artifact, _KERNELS[key])

    def run(self, grid: int, values: Mapping[str, Any], outputs: tuple[torch.Tensor, ...]) -> None:
        """Packs `values` and launches `grid` blocks. A tensor among the values stands for its address."""
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        names = {field.name for field in self.kernel.params.fields}
        packed = {name: value for name, value in values.items() if name in names}
        params = self.kernel.params.pack(packed | {name: tensor.data_ptr() for name, tensor in tensors.items()})
        if isinstance(self._loaded, CudaKernel):
            stream = torch.cuda.current_stream(outputs[0].device).cuda_stream
            self._loaded.launch(grid=grid, threads=self.kernel.threads, params=params, stream=stream)
            return
        ranges = [
            (tensor.data_ptr(), _extent_bytes(tensor), any(tensor is output for output in outputs))
            for tensor in tensors.values()
        ]
        self._loaded.launch(
            grid=grid,
            threads=self.kernel.threads,
            smem_bytes=self.kernel.smem_bytes,
            params=params,
            ranges=ranges,
            seed=env.emulate_seed(),
        )


@cache  # one notice a process
def _warn_of_fallback(name: str) -> None:
    log.warning("no GPU and no FAGEN_ARCH: building for %s", name)


def _default_arch() -> Arch:
    archs, source = target.default_archs()
    if not source:
        _warn_of_fallback(archs[0].name)
    return archs[0]


def _check_tensors(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[int, int, int, int, int]:
    """(B, Sq, Hq, Sk, Hk); SpecError unless the three fit the spec and one another."""
    for name, tensor, dim in (("q", q, spec.head_dim), ("k", k, spec.head_dim), ("v", v, spec.dim_v)):
        if not isinstance(tensor, torch.Tensor):
            raise SpecError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise SpecError(f"{name} has {tensor.dim()} dimensions; expected (batch, seqlen, heads, head_dim)")
        if tensor.dtype != DTYPES[spec.dtype]:
            raise SpecError(f"{name} has dtype {tensor.dtype}; the spec's dtype is {spec.dtype} ({DTYPES[spec.dtype]})")
        if tensor.shape[3] != dim:
            raise SpecError(f"{name} has head dim {tensor.shape[3]}; the spec's is {dim}")
        if tensor.device != q.device:
            raise SpecError(f"{name} is on {tensor.device}, q on {q.device}; all tensors must be on one device")
        if tensor.stride(3) != 1:
            raise SpecError(
                f"{name} has stride {tensor.stride(3)} in its last dimension, which must be contiguous: "
                f"pass {name}.contiguous()"
            )
        if tensor.shape[1] > MAX_SEQLEN:
            raise SpecError(f"{name} has {tensor.shape[1]} positions; at most {MAX_SEQLEN} are served")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise SpecError("an input requires a gradient, and the kernel computes none: call under torch.no_grad()")
    batch, seqlen_q, heads_q, _ = q.shape
    _, seqlen_k, heads_k, _ = k.shape
    if k.shape[0] != batch or v.shape[0] != batch:
        raise SpecError(f"q, k and v have batches of {batch}, {k.shape[0]} and {v.shape[0]}; they must be equal")
    if v.shape[1] != seqlen_k or v.shape[2] != heads_k:
        raise SpecError(
            f"k is {tuple(k.shape[:3])} and v {tuple(v.shape[:3])} in (batch, seqlen, heads): must be equal"
        )
    if heads_k == 0 or heads_q % heads_k:
        raise SpecError(f"{heads_q} query heads over {heads_k} key heads: the first must be a multiple of the second")
    return batch, seqlen_q, heads_q, seqlen_k, heads_k


def _check_given(feature: str, argument: str, wanted: bool, value: Any) -> None:
    if wanted and value is None:
        raise SpecError(f"the spec has {feature}=True: pass {argument}=...")
    if not wanted and value is not None:
        raise SpecError(f"{argument} is given, but the spec lacks the feature: AttentionSpec(..., {feature}=True)")


def _window(spec: AttentionSpec, window: tuple[int, int] | None, seqlen_q: int, seqlen_k: int) -> Mapping[str, int]:
    """Bounds for the kernel: -1 becomes a distance past every key, and causal closes the right side."""
    if not spec.window:
        _check_given("window", "window", False, None if window in ((-1, -1), [-1, -1]) else window)
        return {}
    _check_given("window", "window", True, window)
    if (
        not isinstance(window, tuple | list)
        or len(window) != 2
        or any(isinstance(side, bool) or not isinstance(side, int) or side < -1 for side in window)
    ):
        raise SpecError(f"window={window!r}: expected (left, right), each an integer of at least 0, or -1 for no bound")
    unbounded = seqlen_q + seqlen_k
    left, right = (unbounded if side < 0 else min(side, unbounded) for side in window)
    return {"window_left": left, "window_right": 0 if spec.causal else right}


def _dropout(spec: AttentionSpec, p: float | None, seed: int | None, device: torch.device) -> Mapping[str, Any]:
    if not spec.dropout:
        _check_given("dropout", "dropout_p", False, None if p == 0 else p)
        _check_given("dropout", "seed", False, seed)
        return {}
    _check_given("dropout", "dropout_p", True, p)
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
        raise SpecError(f"dropout_p={p!r} must be a number of at least 0 and below 1")
    if seed is None:
        state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
        state[1] = 0
    elif isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise SpecError(f"seed={seed!r} must be an integer that fits in 64 bits")
    else:
        state = torch.tensor([seed - 2**64 if seed >= 2**63 else seed, 0], dtype=torch.int64, device=device)
    threshold = keep_threshold(p)
    return {"philox_state": state, "keep_threshold": threshold, "keep_scale": 65536 / threshold}


def _stride(tensor: torch.Tensor, index: int) -> int:
    """Stride in elements; 0 for a dimension of one entry, whose stride means nothing and may be anything."""
    return tensor.stride(index) if tensor.shape[index] > 1 else 0


def _aligned(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a contiguous copy where a row of it does not start on a multiple of 16 bytes."""
    step = ALIGNMENT // tensor.element_size()
    if tensor.data_ptr() % ALIGNMENT == 0 and all(_stride(tensor, index) % step == 0 for index in range(3)):
        return tensor
    log.debug("%s is copied: its rows do not start on multiples of %d bytes", name, ALIGNMENT)
    return tensor.clone(memory_format=torch.contiguous_format)


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of `tensor`, which may be strided or expanded."""
    if tensor.numel() == 0:
        return 0
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (span + 1) * tensor.element_size()
