"""Kernels in memory: built, loaded once a process and device, and launched with packed parameters."""

from __future__ import annotations

import ctypes
import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fagen import env
from fagen.arch import Arch
from fagen.build import find_or_build
from fagen.cache import Artifact, BundledArtifact
from fagen.driver import Gpu
from fagen.emulator import EmulatedKernel
from fagen.errors import LaunchError
from fagen.launch import CudaKernel, current_stream
from fagen.params import MAP_BYTES, Field
from fagen.plan import KernelPlan, plan
from fagen.spec import AttentionSpec
from fagen.tensor_map import TensorMap
from fagen.tuned import plan_for

log = logging.getLogger("fagen")

# Loaded kernels by (directory of the artifact, device). The directory's name holds the digest, so that an edited
# template is another entry.
_LOADED: dict[tuple[str, int | None], CudaKernel | EmulatedKernel] = {}

_WORD = 8  # bytes
_MOST_PACKED = 256  # structs kept a launch: allocators bring back the same few addresses


class Kernel:
    """One built kernel on one device."""

    def __init__(
        self,
        kernel_plan: KernelPlan,
        artifact: Artifact,
        device: int | None,
        own: Mapping[str, torch.Tensor | int] | None = None,
    ) -> None:
        """Loads the kernel where the process has not yet. `device=None` is the CPU; `own` has parameters that are the
        same in every launch, of a traced kernel what it writes to."""
        key = (str(artifact.directory), device)
        if key not in _LOADED:
            if device is None:
                _LOADED[key] = EmulatedKernel(artifact.binary, kernel_plan.entry)
            else:
                binary = artifact.image if isinstance(artifact, BundledArtifact) else artifact.binary
                _LOADED[key] = CudaKernel(
                    *(binary, kernel_plan.entry, device, kernel_plan.smem_bytes), overlaps=kernel_plan.overlaps
                )
        self.plan = kernel_plan
        self.artifact = artifact
        self.own = own or {}
        self.loaded = _LOADED[key]


def load(spec: AttentionSpec, arch: Arch, device: int | None) -> dict[str, Kernel]:
    """The kernels of `spec` by kind, built where the cache lacks them."""
    plans = planned(spec, arch, device)
    if plans[0].family != arch.family:
        log.debug("%s: the %s family has no such kernel, that of %s runs", spec.slug, arch.family, plans[0].family)
    return load_planned(plans, device)


def planned(spec: AttentionSpec, arch: Arch, device: int | None) -> tuple[KernelPlan, ...]:
    """The kernels of `spec`. `device=None` is the CPU, where they have the tiles of the tables; those for a card have
    what was tuned on it."""
    return plan(spec, arch) if device is None else plan_for(spec, arch, lambda: card(device))


def card(device: int) -> Gpu:
    """A device of PyTorch, as the driver describes it."""
    return Gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))


def load_planned(plans: Sequence[KernelPlan], device: int | None) -> dict[str, Kernel]:
    """The kernels that `plans` are, by kind, as `load` loads them."""
    artifacts = find_or_build(plans, emulate=device is None)
    try:
        return _loaded(plans, artifacts, device)
    except (FileNotFoundError, LaunchError):
        if all(isinstance(artifact, BundledArtifact) or artifact.binary.exists() for artifact in artifacts):
            raise
        # Another process has cleaned the cache in the meantime.
        return _loaded(plans, find_or_build(plans, emulate=device is None), device)


def _loaded(plans: Sequence[KernelPlan], artifacts: Sequence[Artifact], device: int | None) -> dict[str, Kernel]:
    return {one.kind: Kernel(one, artifact, device) for one, artifact in zip(plans, artifacts, strict=True)}


class Launch:
    """A launch that lacks only the addresses of its tensors. Any number of threads may run it at once."""

    def __init__(
        self,
        kernel: Kernel,
        grid: int,
        values: Mapping[str, Any],
        tensors: Sequence[str],
        maps: Mapping[str, TensorMap] | None = None,
    ) -> None:
        """`values` has the parameters that are no tensors, and may have others; `tensors` names the tensors, in the
        order in which a call gives them, and `maps` has those that the kernel takes as tensor maps."""
        maps = maps or {}
        fields = kernel.plan.params.fields
        values = {**values, **{name: _address(value) for name, value in kernel.own.items()}}
        names = {field.name for field in fields if field.is_tensor} - kernel.own.keys()
        if names != set(tensors):
            raise LaunchError(f"{kernel.plan.entry} takes the tensors {sorted(names)}, not {sorted(tensors)}")
        packed = kernel.plan.params.pack(
            {field.name: _empty(field) if field.name in names else _value(values, field.name) for field in fields}
        )
        self.kernel = kernel
        self.grid = grid
        # Maps and then members of 8 bytes come first, so that a tensor's place counts in words. One word before them: a
        # launch wants the addresses of its parameters, here of the struct, in memory.
        places, word = {}, 1
        for field in fields:
            places[field.name] = word
            word += struct.calcsize("=" + field.format) // _WORD
        self._places = tuple((places[name], maps.get(name)) for name in tensors)
        read_only = {field.name for field in fields if field.ctype.startswith("const")}
        self._writable = tuple(name not in read_only for name in tensors)
        self._template = bytes(_WORD) + packed
        self._words = ctypes.c_uint64 * (len(self._template) // _WORD)
        self._threads = kernel.plan.threads
        self._packed: dict[tuple[int | None, ...], tuple[Any, int]] = {}

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launches on the current stream of the kernel's device, or runs on the CPU. None is a null pointer."""
        addresses = tuple([None if tensor is None else tensor.data_ptr() for tensor in tensors])
        words, pointers = self._packed.get(addresses) or self._pack(addresses)
        loaded = self.kernel.loaded
        if isinstance(loaded, CudaKernel):
            loaded.launch_at(self.grid, self._threads, pointers, current_stream(loaded.device))
            return
        ranges = [
            (tensor.data_ptr(), _extent_bytes(tensor), writable)
            for tensor, writable in zip(tensors, self._writable, strict=True)
            if tensor is not None
        ]
        own = [value for value in self.kernel.own.values() if isinstance(value, torch.Tensor)]
        ranges += [(tensor.data_ptr(), _extent_bytes(tensor), True) for tensor in own]
        loaded.launch(
            grid=self.grid,
            threads=self._threads,
            smem_bytes=self.kernel.plan.smem_bytes,
            params=bytes(words)[_WORD:],
            ranges=ranges,
            seed=env.emulate_seed(),
        )

    def _pack(self, addresses: tuple[int | None, ...]) -> tuple[Any, int]:
        """The words of a launch with tensors at `addresses`, and where in memory they lie.

        Nobody writes to them afterwards: concurrent callers share them.
        """
        words = self._words.from_buffer_copy(self._template)
        start = ctypes.addressof(words)
        words[0] = start + _WORD
        for address, (word, tensor_map) in zip(addresses, self._places, strict=True):
            if tensor_map is not None and address is not None:
                ctypes.memmove(start + _WORD * word, tensor_map.at(address), MAP_BYTES)
            elif address is not None:
                words[word] = address
        if len(self._packed) >= _MOST_PACKED:
            self._packed.clear()
        self._packed[addresses] = words, start
        return words, start


def _empty(field: Field) -> Any:
    """What a tensor's member holds before a call."""
    return bytes(MAP_BYTES) if field.is_map else 0


def _address(value: torch.Tensor | int) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _value(values: Mapping[str, Any], name: str) -> Any:
    if name not in values:
        raise LaunchError(f"no value for the kernel parameter {name!r}")
    return values[name]


def _extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of `tensor`, which may be strided or expanded."""
    if tensor.numel() == 0:
        return 0
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (span + 1) * tensor.element_size()
