"""Test kernels (the .cu files here) built for the CPU the way the renderer builds the real ones."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from fagen.arch import Arch, resolve, sm80
from fagen.emulator import EmulatedKernel
from fagen.render import environment, template_dir
from fagen.toolchain import Compiler, find_cuda_compiler, find_host_compiler

HERE = Path(__file__).parent


def body(name: str) -> str:
    """The text of the kernel `name`: what nvcc would compile after the PTX primitives."""
    return (HERE / f"{name}.cu").read_text(encoding="utf-8")


def assemble(name: str) -> str:
    """The one file that is compiled: runtime, primitives, body, launch."""
    emulate = template_dir() / "emulate"
    headers = ["runtime.hpp", *(f"{primitive}.hpp" for primitive in (*sm80.PRIMITIVES, "tanh"))]
    launch = environment().get_template("emulate/launch.hpp.j2").render(kernel={"entry": name})
    parts = [*((emulate / header).read_text(encoding="utf-8") for header in headers), "// ==== kernel ====\n"]
    return "\n".join([*parts, body(name), "// ==== end of kernel ====\n", launch])


def compile_kernel(name: str, directory: Path, *, source: str | None = None) -> Path:
    """Compiles the kernel `name` (or `source` in its place) for the CPU in `directory` and returns the library."""
    return _compile(
        find_host_compiler(), source or assemble(name), directory, "kernel.cpp", "kernel.so", resolve("sm80")
    )


def compile_cuda(name: str, directory: Path, arch: Arch) -> Path:
    """Compiles the same body behind the PTX primitives for a GPU and returns the binary."""
    ptx = template_dir() / "ptx"
    headers = [(ptx / f"{primitive}.cuh").read_text(encoding="utf-8") for primitive in (*sm80.PRIMITIVES, "tanh")]
    return _compile(
        find_cuda_compiler(), "\n".join([*headers, body(name)]), directory, "kernel.cu", "kernel.cubin", arch
    )


def _compile(compiler: Compiler, source: str, directory: Path, text: str, binary: str, arch: Arch) -> Path:
    directory.mkdir(parents=True)
    (directory / text).write_text(source, encoding="utf-8")
    command = compiler.command(arch, str(directory / text), str(directory / binary))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / binary


def pack(arguments: Sequence[torch.Tensor | int]) -> bytes:
    """The bytes of Params: the members in order, tensors (as pointers) first."""
    values = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
    kinds = "".join("Q" if isinstance(value, torch.Tensor) else "i" for value in arguments)
    params = struct.pack(f"<{kinds}", *values)
    return params.ljust(-(-len(params) // 8) * 8, b"\0")


def launch(
    kernel: EmulatedKernel,
    *arguments: torch.Tensor | int,
    grid: int = 1,
    threads: int = 128,
    smem_bytes: int = 1024,
    read_only: Collection[int] = (),
    seed: int = 0,
) -> None:
    """Launches with `arguments` as the members of Params, tensors first. Those at the places `read_only` are inputs."""
    ranges = [
        (value.data_ptr(), value.numel() * value.element_size(), index not in read_only)
        for index, value in enumerate(arguments)
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
