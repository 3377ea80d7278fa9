"""Test kernels (the .cu files here) built for the CPU the way the renderer builds the real ones."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fagen import tensor_map
from fagen.arch import Arch, resolve, sm80
from fagen.emulator import EmulatedKernel
from fagen.render import environment, template_dir
from fagen.toolchain import Compiler, find_cuda_compiler, find_host_compiler

HERE = Path(__file__).parent
HOPPER_PRIMITIVES = ("mbarrier", "tma", "warpgroup", "stmatrix", "wgmma", "bulk", "reduce", "turns")


class Hopper(NamedTuple):
    """The primitives of Hopper too, with these shapes of products, (form, n)."""

    shapes: tuple[tuple[str, int], ...] = ()
    dtype: str = "bf16"


class Map(NamedTuple):
    """A tensor map over a tensor of up to four dimensions, `box` elements of each, outermost first as the shape is."""

    tensor: torch.Tensor
    box: tuple[int, ...]
    swizzle: int = 128


Argument = torch.Tensor | Map | int


def body(name: str, hopper: Hopper | None = None) -> str:
    """The text of the kernel `name`: what nvcc would compile after the PTX primitives."""
    text = (HERE / f"{name}.cu").read_text(encoding="utf-8")
    return text.replace("k16_bf16", "k16_f16") if hopper and hopper.dtype == "fp16" else text


def assemble(name: str, hopper: Hopper | None = None) -> str:
    """The one file that is compiled: runtime, primitives, body, launch."""
    launch = environment().get_template("emulate/launch.hpp.j2").render(kernel={"entry": name})
    headers = [header("emulate/runtime.hpp", hopper), *_primitives("emulate", "hpp", hopper)]
    return "\n".join([*headers, "// ==== kernel ====\n", body(name, hopper), "// ==== end of kernel ====\n", launch])


def compile_kernel(name: str, directory: Path, *, source: str | None = None, hopper: Hopper | None = None) -> Path:
    """Compiles the kernel `name` (or `source` in its place) for the CPU in `directory` and returns the library."""
    return _compile(
        find_host_compiler(), source or assemble(name, hopper), directory, "kernel.cpp", "kernel.so", resolve("sm80")
    )


def compile_cuda(name: str, directory: Path, arch: Arch, hopper: Hopper | None = None) -> Path:
    """Compiles the same body behind the PTX primitives for a GPU and returns the binary."""
    source = "\n".join([*_primitives("ptx", "cuh", hopper), body(name, hopper)])
    return _compile(find_cuda_compiler(), source, directory, "kernel.cu", "kernel.cubin", arch)


def _primitives(folder: str, suffix: str, hopper: Hopper | None) -> list[str]:
    names = (*sm80.PRIMITIVES, *sm80.PAGE_PRIMITIVES, "tanh", *(HOPPER_PRIMITIVES if hopper else ()))
    return [header(f"{folder}/{name}.{suffix}", hopper) for name in names]


def header(path: str, hopper: Hopper | None = None) -> str:
    """The text of a primitive's header, relative to `templates/`; some are rendered for the shapes of `hopper`."""
    if (template_dir() / path).is_file():
        return (template_dir() / path).read_text(encoding="utf-8")
    assert hopper is not None
    return (
        environment()
        .get_template(f"{path}.j2")
        .render(kernel={"wgmma_shapes": hopper.shapes}, spec={"dtype": hopper.dtype})
    )


def _compile(compiler: Compiler, source: str, directory: Path, text: str, binary: str, arch: Arch) -> Path:
    directory.mkdir(parents=True)
    (directory / text).write_text(source, encoding="utf-8")
    command = compiler.command(arch, str(directory / text), str(directory / binary))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / binary


def emulated_map(entry: Map) -> bytes:
    """What the emulator takes for a tensor map."""
    missing = max(0, 4 - entry.tensor.dim())
    bytes_each = entry.tensor.element_size()
    return tensor_map.emulated_map(
        entry.tensor.data_ptr(),
        [*reversed(entry.tensor.shape), *[1] * missing],
        [*(stride * bytes_each for stride in reversed(entry.tensor.stride()[:-1])), *[0] * missing],
        [*reversed(entry.box), *[1] * missing],
        bytes_each,
        {0: 0, 32: 1, 64: 2, 128: 3}[entry.swizzle],
    )


def pack(arguments: Sequence[Argument], encode: Callable[[Map], bytes] = emulated_map) -> bytes:
    """The bytes of Params: the members in order, maps first, then tensors (as pointers)."""
    maps = b"".join(encode(value) for value in arguments if isinstance(value, Map))
    if maps:
        rest = pack([value for value in arguments if not isinstance(value, Map)])
        return (maps + rest).ljust(-(-len(maps + rest) // 64) * 64, b"\0")
    values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
    kinds = "".join("Q" if isinstance(value, torch.Tensor) else "i" for value in arguments)
    params = struct.pack(f"<{kinds}", *values)
    return params.ljust(-(-len(params) // 8) * 8, b"\0")


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def launch(
    kernel: EmulatedKernel,
    *arguments: Argument,
    grid: int = 1,
    threads: int = 128,
    smem_bytes: int = 1024,
    read_only: Collection[int] = (),
    seed: int = 0,
) -> None:
    """Launches with `arguments` as the members of Params, tensors first. Those at the places `read_only` are inputs."""
    tensors = [value.tensor if isinstance(value, Map) else value for value in arguments]
    ranges = [
        (value.data_ptr(), span(value), index not in read_only)
        for index, value in enumerate(tensors)
        if isinstance(value, torch.Tensor)
    ]
    kernel.launch(
        grid=grid,
        threads=threads,
        smem_bytes=smem_bytes,
        params=pack(arguments),
        ranges=ranges,
        seed=seed,
    )
