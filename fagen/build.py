"""From kernels to artifacts: render, look up, and compile what the cache lacks.

What is missing is compiled by one ninja run, one edge a kernel; a single kernel for NVRTC is compiled in this process.
Each kernel is validated and published as soon as its compiler ends, so that what is done stays done when a later one
fails or the user stops the run.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fagen import cache, env, launched, toolchain
from fagen import render as renderer
from fagen.cache import Artifact, Resources, Target
from fagen.errors import BuildError, CacheError, ToolchainError
from fagen.nvrtc import NvrtcError

if TYPE_CHECKING:
    from fagen.plan import KernelPlan

_BYTES_A_JOB = 300 * 2**20
_EMULATED_ENTRY = "fagen_emulate_launch"
_STOP_SECONDS = 10.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_SPACE_SAID = re.compile("No space left on device|Disk quota exceeded")
_LITTLE_SPACE = 2**20  # less than that free, and a compiler that fails without a word had no room for it
_TRIES = 3  # of a build whose cache is removed meanwhile

# ELF64, as in elf.h
_SHT_SYMTAB, _SHT_NOBITS, _SHT_DYNSYM = 2, 8, 11
_MACH_O = b"\xcf\xfa\xed\xfe"


@dataclass(frozen=True)
class Request:
    """One kernel that is asked for, rendered, with its key."""

    kernel: KernelPlan
    compiler: toolchain.Compiler
    target: Target
    source: str
    digest: str

    @property
    def name(self) -> str:
        return cache.directory_name(self.kernel.slug, self.digest)

    @property
    def source_file(self) -> str:
        return "kernel.cpp" if self.target == "emulate" else "kernel.cu"

    @property
    def binary_file(self) -> str:
        if self.target == "emulate":
            return "kernel.so"
        return "kernel.ptx" if self.kernel.arch.ptx_only else "kernel.cubin"

    def command(self, folder: Path | None = None) -> list[str]:
        source = self.source_file if folder is None else str(folder / self.source_file)
        return self.compiler.command(self.kernel.arch, source, self.binary_file)

    def find(self, *, warn: bool = True, use: bool = True) -> Artifact | None:
        """`cache.find` of it."""
        return cache.find(self.kernel.slug, self.digest, self.target, warn=warn, use=use)


def build(
    kernels: Sequence[KernelPlan],
    *,
    emulate: bool = False,
    jobs: int | None = None,
    on_done: Callable[[Artifact], None] | None = None,
    force: bool = False,
    templates: Path | None = None,
) -> list[Artifact]:
    """The artifacts of `kernels`, in their order, compiled where the cache lacks them or `force` is set.

    `emulate` builds libraries for the CPU in place of cubins. At most `jobs` compilers run at once, fewer where cores,
    memory or MAX_JOBS allow less. `on_done` is called with each artifact once, when it is ready. `templates` is a
    folder to render from in place of `render.template_dir()`.

    Raises ToolchainError before anything is compiled, and BuildError once all others are done where a kernel fails.
    """
    compiler = toolchain.find_host_compiler() if emulate else toolchain.find_cuda_compiler()
    asked = [request_of(kernel, compiler, emulate, templates) for kernel in kernels]
    done: dict[str, Artifact] = {}

    errors_of_caller: list[OSError] = []

    def finish(artifact: Artifact) -> None:
        done[artifact.digest] = artifact
        if on_done is None:
            return
        try:
            on_done(artifact)
        except OSError as error:  # a closed terminal, say: not the cache's fault
            errors_of_caller.append(error)
            raise

    missing: list[Request] = []
    with _errors_of_the_cache(errors_of_caller):
        for request in {request.digest: request for request in asked}.values():
            artifact = None if force else request.find()
            if artifact is None:
                missing.append(request)
            else:
                finish(artifact)
    if missing:
        for arch in dict.fromkeys(request.kernel.arch for request in missing):
            compiler.check(arch)
        limit = job_limit(jobs)
        for tries_left in reversed(range(_TRIES)):
            with _errors_of_the_cache(errors_of_caller):
                try:
                    _build_missing([one for one in missing if one.digest not in done], limit, finish, force)
                    break
                except FileNotFoundError as error:  # somebody removes the cache: it is made anew
                    if tries_left == 0 or error in errors_of_caller:
                        raise
    return [done[request.digest] for request in asked]


@contextmanager
def _errors_of_the_cache(but: Sequence[OSError]) -> Iterator[None]:
    """Makes errors of the file system CacheErrors that say what to do, `but` for those."""
    try:
        yield
    except OSError as error:
        if error in but:
            raise
        if error.errno in _NO_SPACE:
            raise _no_space() from error
        raise CacheError(
            f"{error.filename or cache.cache_dir()}: {error.strerror}: no kernel can be kept there. "
            "Set FAGEN_CACHE_DIR to a directory of your own"
        ) from error


def find_or_build(kernels: Sequence[KernelPlan], *, emulate: bool = False) -> list[Artifact]:
    """What `fagen.load` runs: what the cache has, else what a bundle has of the same source, else as `build`. With
    FAGEN_JIT=0 a kernel that neither has is an error. Without a CUDA compiler any cubin of the same source serves.

    Raises CacheError that names the missing kernel, the nearest ones and the command which builds it.
    """
    env.compiler()  # a bad value is an error, and not the lack of a compiler
    compiler: toolchain.Compiler | None = None
    lacking: ToolchainError | None = None
    try:
        compiler = toolchain.find_host_compiler() if emulate else toolchain.find_cuda_compiler()
    except ToolchainError as error:
        if emulate:
            raise
        lacking = error
    found: dict[int, Artifact] = {}
    for index, kernel in enumerate(kernels):
        artifact = _find(kernel, compiler, emulate)
        if artifact is not None:
            found[index] = artifact
    missing = [kernel for index, kernel in enumerate(kernels) if index not in found]
    if missing and not env.jit():
        from fagen import nearest

        raise nearest.missing(missing[0], "emulate" if emulate else "cuda", compiler.identity if compiler else None)
    if missing and lacking is not None:
        raise lacking
    built = iter(build(missing, emulate=emulate) if missing else ())
    return [found[index] if index in found else next(built) for index in range(len(kernels))]


def are_found(kernels: Sequence[KernelPlan]) -> bool:
    """Whether `find_or_build` has nothing to build of `kernels`."""
    try:
        compiler = toolchain.find_cuda_compiler()
    except ToolchainError:
        compiler = None
    return all(_find(kernel, compiler, emulate=False) is not None for kernel in kernels)


def _find(kernel: KernelPlan, compiler: toolchain.Compiler | None, emulate: bool) -> Artifact | None:
    """What is built of `kernel`: in the cache by `compiler`, or without one by any, or in a bundle."""
    if compiler is None:
        source = renderer.render(kernel, "cuda")
        artifact = cache.find_by_source(kernel.slug, source, kernel.arch.name)
    else:
        request = request_of(kernel, compiler, emulate)
        source = request.source
        with _errors_of_the_cache([]):
            artifact = request.find(warn=not env.jit())  # else `build` warns
    if artifact is None and not emulate:
        from fagen import bundle  # 20 ms, which a warm look-up need not pay

        artifact = bundle.find(kernel.slug, source, kernel.arch.name)
    return artifact


def job_limit(jobs: int | None = None) -> int:
    """How many compilers may run at once: `jobs`, else one a core, within MAX_JOBS and 300 MB of free memory each."""
    bounds = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    if jobs is not None:
        bounds = [jobs]
    memory = _available_memory()
    if memory is not None:
        bounds.append(memory // _BYTES_A_JOB)
    most = env.max_jobs()
    if most is not None:
        bounds.append(most)
    return max(1, min(bounds))


def parse_resources(log: str, entry: str) -> Resources | None:
    """What `ptxas -v` says of kernel `entry`, in the log of nvcc or of NVRTC; None where it says nothing."""
    _, found, rest = log.partition(f"Compiling entry function '{entry}'")
    if not found:
        return None
    rest = rest.partition("Compiling entry function")[0]
    frame = re.search(
        rf"Function properties for {re.escape(entry)}\s.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
        rest,
        re.DOTALL,
    )
    used = re.search(r"Used (\d+) registers(.*)", rest)
    if not frame or not used:
        return None
    smem = re.search(r"(\d+) bytes smem", used[2])
    return Resources(
        registers=int(used[1]),
        spill_stores=int(frame[2]),
        spill_loads=int(frame[3]),
        stack=int(frame[1]),
        smem=int(smem[1]) if smem else 0,
    )


def request_of(
    kernel: KernelPlan, compiler: toolchain.Compiler, emulate: bool, templates: Path | None = None
) -> Request:
    """`kernel` rendered, with the key of what `compiler` makes of it."""
    target: Target = "emulate" if emulate else "cuda"
    source = renderer.render(kernel, target, templates)
    key = cache.digest(source, compiler.flags(kernel.arch), kernel.arch.name, compiler.identity)
    return Request(kernel, compiler, target, source, key)


def _build_missing(missing: Sequence[Request], jobs: int, finish: Callable[[Artifact], None], force: bool) -> None:
    """Builds each request under its lock, as far as it is still missing then.

    Locks are waited for only while none is held, so two processes that want the same kernels in another order cannot
    wait for each other.
    """
    root = cache.build_dir(missing[0].target)
    failures: list[BuildError] = []
    waiting = list(missing)
    while waiting:
        with ExitStack() as locks:
            held: dict[str, ExitStack] = {}
            for request in waiting:
                own = locks.enter_context(ExitStack())
                if own.enter_context(cache.lock(root, request.name, wait=False)):
                    held[request.digest] = own
            if not held:
                held[waiting[0].digest] = own = locks.enter_context(ExitStack())
                own.enter_context(cache.lock(root, waiting[0].name))

            def ready(artifact: Artifact, held: dict[str, ExitStack] = held) -> None:
                held[artifact.digest].close()
                finish(artifact)

            todo: list[Request] = []
            for request in (request for request in waiting if request.digest in held):
                artifact = None if force else request.find(warn=False)  # another process may have been first
                if artifact is None:
                    todo.append(request)
                else:
                    ready(artifact)
            if todo:
                failures += _compile_all(todo, root, jobs, ready, force)
        waiting = [request for request in waiting if request.digest not in held]
    if len(failures) == 1:
        raise failures[0]
    if failures:
        first = failures[0]
        reason = f"{len(failures)} of {len(missing)} kernels failed; the first:\n{first.reason}"
        raise BuildError(reason, command=first.command, log=first.log, source=first.source)


def _compile_all(
    todo: Sequence[Request], root: Path, jobs: int, finish: Callable[[Artifact], None], force: bool
) -> list[BuildError]:
    """Compiles in a temporary directory and publishes each kernel as it is ready. Returns what failed."""
    failures: list[BuildError] = []
    through_launcher = _has_launcher(todo[0].compiler)
    if through_launcher:
        launched.sweep(root)
    with cache.staging(root) as scratch, ExitStack() as links:
        for index, request in enumerate(todo):
            folder = scratch / str(index)
            if through_launcher:
                links.enter_context(launched.linked(root, request.name, folder))
            else:
                folder.mkdir(mode=0o755)
            (folder / request.source_file).write_text(request.source, encoding="utf-8")
        alone = todo[0].compiler if len(todo) == 1 else None
        if isinstance(alone, toolchain.NvrtcCompiler):
            outcomes = _in_process(todo[0], alone, scratch / "0")
        else:
            outcomes = _ninja(todo, scratch, min(jobs, len(todo)))
        with closing(outcomes):
            for index, log, seconds in outcomes:
                request = todo[index]
                launched.settle(scratch / str(index))
                try:
                    if seconds is None:
                        raise BuildError(f"{request.kernel.slug} does not compile", command=request.command(), log=log)
                    artifact = _publish(request, scratch / str(index), root, log, seconds, force)
                except BuildError as error:
                    failures.append(_keep(error, request, scratch / str(index), root))
                else:
                    finish(artifact)
    return failures


def _has_launcher(compiler: toolchain.Compiler) -> bool:
    return isinstance(compiler, toolchain.NvccCompiler) and bool(compiler.launcher)


# One outcome a kernel, as each ends: its index, its log, and the seconds it took, None where the compiler failed.
_Outcomes = Generator[tuple[int, str, float | None], None, None]


def _in_process(request: Request, compiler: toolchain.NvrtcCompiler, folder: Path) -> _Outcomes:
    start = time.perf_counter()
    try:
        binary, log = compiler.compile(request.kernel.arch, request.source.encode(), request.source_file)
    except NvrtcError as error:
        yield 0, str(error), None
        return
    except OSError as error:
        raise ToolchainError(f"{compiler.library} cannot be opened: {error}") from error
    (folder / request.binary_file).write_bytes(binary)
    yield 0, log, time.perf_counter() - start


def _ninja(todo: Sequence[Request], scratch: Path, jobs: int) -> _Outcomes:
    """Runs one ninja over folders `0`, `1`, ... of `scratch`.

    Everything that ninja and its shell read is a name relative to `scratch`, so the path of the cache may hold any
    character. Each edge leaves its log and two marks whose times tell how long it took.
    """
    (scratch / "build.ninja").write_text(_ninja_file(todo), encoding="utf-8")
    command = [str(toolchain.find_ninja()), "-f", "build.ninja", "-j", str(jobs), "-k", "0"]
    environment = env.for_compilers() | {"NINJA_STATUS": ""}
    # nvcc breaks on a temporary directory with a space or `$` in its path; "." is the folder of the edge. A launcher's
    # server, which an edge may start, outlives that folder and needs a directory that stays.
    if not _has_launcher(todo[0].compiler):
        environment["TMPDIR"] = "."
    waiting = dict(enumerate(todo))
    try:
        process = subprocess.Popen(
            command,
            cwd=scratch,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes to this process alone, which stops ninja in order
        )
    except OSError as error:
        _check_there(scratch)
        raise ToolchainError(f"{command[0]} does not start: {error.strerror}") from error
    assert process.stdout is not None
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line)
            for index in [index for index in waiting if (scratch / str(index) / "finished").exists()]:
                del waiting[index]
                yield _outcome(scratch / str(index), index)
        process.wait()
    finally:
        _stop(process)
    for index in sorted(waiting):
        yield _outcome(scratch / str(index), index, "".join(said))


def _outcome(folder: Path, index: int, said: str = "") -> tuple[int, str, float | None]:
    log = folder / "log"
    text = log.read_text(errors="replace") if log.exists() else ""
    finished = folder / "finished"
    if not finished.exists():
        _check_there(folder)
        if _NO_SPACE_SAID.search(text + said) or (not text.strip() and _free_space(folder) < _LITTLE_SPACE):
            raise _no_space()
        return index, text or said, None
    seconds = finished.stat().st_mtime - (folder / "started").stat().st_mtime
    return index, text, max(seconds, 0.0)


def _ninja_file(todo: Sequence[Request]) -> str:
    lines = ["rule compile", "  command = $run", "  description = $out", ""]
    for index, request in enumerate(todo):
        command = shlex.join(request.command())
        if "\n" in command or "\r" in command:  # which end a statement of ninja, however they are quoted
            raise ToolchainError(f"a line break in the compiler's command: {request.command()}")
        run = f"cd {index} && : > started && {command} > log 2>&1 && : > finished"
        lines += [
            f"build {index}/{request.binary_file}: compile {index}/{request.source_file}",
            f"  run = {run.replace('$', '$$')}",
            "",
        ]
    return "\n".join(lines)


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends ninja if it still runs. It passes SIGTERM on to every compiler and waits for them."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _publish(request: Request, folder: Path, root: Path, log: str, seconds: float, force: bool) -> Artifact:
    """Checks what the compiler wrote, adds the other files of an artifact, and moves all to its place."""
    kernel, command = request.kernel, request.command()
    binary = folder / request.binary_file
    problem = _problem(binary, request)
    if problem is not None:
        raise BuildError(f"{kernel.slug}: {problem}", command=command, log=log)
    resources = parse_resources(log, kernel.entry)
    for scrap in set(os.listdir(folder)) - {request.source_file, request.binary_file}:
        path = folder / scrap
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / "spec.json").write_text(kernel.spec.model_dump_json(indent=2) + "\n")
    values = None if resources is None else dataclasses.asdict(resources)
    (folder / "resources.json").write_text(json.dumps(values, indent=2) + "\n")
    _write_log(folder, request, log)
    fields = {
        "slug": kernel.slug,
        "digest": request.digest,
        "entry": kernel.entry,
        "arch": kernel.arch.name,
        "target": request.target,
        "compiler": request.compiler.identity,
        "flags": list(request.compiler.flags(kernel.arch)),
        "seconds": round(seconds, 4),
        "source": request.source_file,
        "binary": request.binary_file,
    }
    cache.seal(folder, fields)
    artifact = cache.publish(folder, root, request.name, replace=force)
    cache.check_trust(artifact)
    cache.forget_failed(root, request.name)
    return dataclasses.replace(artifact, cached=False)


def _keep(error: BuildError, request: Request, folder: Path, root: Path) -> BuildError:
    """The error with the path where the source was kept, and a command that can be run again from anywhere."""
    with suppress(OSError):
        for scrap in set(os.listdir(folder)) - {request.source_file}:
            (folder / scrap).unlink()
        _write_log(folder, request, error.log)
    kept = cache.keep_failed(root, request.name, folder)
    if kept is None:
        return error
    return BuildError(error.reason, command=request.command(kept), log=error.log, source=kept / request.source_file)


def _write_log(folder: Path, request: Request, log: str) -> None:
    head = f"# {request.compiler.identity}\n# {shlex.join(request.command())}\n"
    (folder / "build.log").write_text(head + log.strip() + "\n", encoding="utf-8")


def _problem(path: Path, request: Request) -> str | None:
    """Why the compiler's output is not the kernel; None where it is."""
    _check_there(path.parent)
    if not path.is_file() or path.stat().st_size == 0:
        return f"the compiler reported success and wrote no {path.name}"
    data = path.read_bytes()
    if path.suffix == ".ptx":
        entry = request.kernel.entry
        return None if re.search(rf"\.entry\s+{entry}\b".encode(), data) else f"{path.name} has no entry {entry}"
    entry = _EMULATED_ENTRY if request.target == "emulate" else request.kernel.entry
    if data[:4] == _MACH_O and request.target == "emulate":
        return None if f"_{entry}\0".encode() in data else f"{path.name} has no function {entry}"
    if data[:6] != b"\x7fELF\x02\x01":
        return f"{path.name} is not an ELF file"
    try:
        defined = _elf_symbols(data, _SHT_DYNSYM if request.target == "emulate" else _SHT_SYMTAB)
    except (struct.error, IndexError, ValueError) as error:
        return f"{path.name} is not a whole ELF file: {error}"
    return None if entry in defined else f"{path.name} has no function {entry}"


def _elf_symbols(data: bytes, table: int) -> set[str]:
    """Names of the defined symbols in the section of type `table` of a little-endian ELF64 file.

    Raises ValueError, IndexError or struct.error where a part of the file is missing.
    """
    segments, offset = struct.unpack_from("<QQ", data, 0x20)
    segment_size, segment_count, size, count = struct.unpack_from("<HHHH", data, 0x36)
    # name, type, flags, address, offset, size, link, info, alignment, size of an entry
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, offset + index * size) for index in range(count)]
    ends = [section[4] + section[5] for section in sections if section[1] != _SHT_NOBITS]
    for index in range(segment_count):
        # type, flags, offset, virtual address, physical address, size in the file
        segment = struct.unpack_from("<IIQQQQ", data, segments + index * segment_size)
        ends.append(segment[2] + segment[5])
    if max(ends, default=0) > len(data):
        raise ValueError(f"{max(ends)} bytes are announced, {len(data)} are there")
    names: set[str] = set()
    for section in sections:
        if section[1] != table:
            continue
        strings = sections[section[6]][4]
        for start in range(section[4], section[4] + section[5], section[9]):
            # name, info, other, index of its section
            name, _, _, home = struct.unpack_from("<IBBH", data, start)
            if home:
                names.add(data[strings + name : data.index(b"\0", strings + name)].decode(errors="replace"))
    return names


def _available_memory() -> int | None:
    """Bytes that new processes can use: of the machine and of this container; None where the system does not tell."""
    bounds: list[int] = []
    with suppress(OSError, ValueError):
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if match:
            bounds.append(int(match[1]) * 1024)
    for folder, limit, usage, cached in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # a limit of "max" is no number
            group = Path(folder)
            free = int((group / limit).read_text()) - int((group / usage).read_text())
            reclaimable = re.search(rf"^{cached} (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
            bounds.append(max(0, free + (int(reclaimable[1]) if reclaimable else 0)))
    return min(bounds) if bounds else None


def _check_there(folder: Path) -> None:
    """Raises FileNotFoundError where somebody has removed the folder of a build, before a compiler is blamed for it."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "removed while a kernel is built", str(folder))


def _free_space(folder: Path) -> int:
    """Bytes that this user can still write there."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def _no_space() -> CacheError:
    return CacheError(
        f"no space left in {cache.cache_dir()}, nothing was published: free some, "
        "or set FAGEN_CACHE_DIR to another disk"
    )
