"""What a build and a cache do when things go wrong. `tests/soak.py` draws such faults at random; here each is its own
test, with what it must lead to, and a few rounds of the soak."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_toolchain import ROOT, Stub, elf, kernels, make_kernel, render, run_as_other, script, script_env

import fagen
from fagen import build, cache, toolchain
from fagen import kernels as in_memory
from fagen.errors import BuildError, CacheError, LaunchError, ToolchainError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(folder))
    monkeypatch.setattr("fagen.render.render", render)
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)
    return folder


@pytest.fixture
def nvcc(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    return stub


def whole(root: Path, stub: Stub, names: str) -> None:
    """The next build is right and says nothing; what killed builders left is swept, by the next that compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernel, artifact in zip(kernels(names), build.build(kernels(names)), strict=True):
            assert cache.read(artifact.directory).binary.read_bytes() == stub.binary_of(render(kernel, "cuda"))
    cache.sweep(root)
    assert {path.name for path in root.iterdir()} - {path.name for path in root.glob("fwd_*-*")} <= {".locks"}


# A builder that is killed

KILL = "import os, signal\ndef kill(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
STEPS = {  # what is patched, and how often a kernel is compiled in all
    "render": ("build.renderer.render = kill", 1),
    "lock": ("cache.staging = kill", 1),
    "before the compiler": ("build._ninja_file = kill", 1),
    "in the compiler": ("build._outcome = kill", 2),
    "validate": ("build._problem = kill", 2),
    "seal": ("cache._manifest_checksum = kill", 2),
    "before the rename": ("cache.publish = kill", 2),
    "after the rename": ("publish = cache.publish; cache.publish = lambda *a, **k: (publish(*a, **k), kill())", 1),
    "clean up": ("cache.shutil.rmtree = kill", 1),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_builder_killed_at_each_step(step: str, root: Path, nvcc: Stub) -> None:
    """Its locks are free, nothing half done is found, its directory is swept, and no step is done again in vain."""
    patch, compilations = STEPS[step]
    environment = script_env(FAGEN_CACHE_DIR=str(root), FAGEN_NVCC=str(nvcc.path))
    done = subprocess.run(
        script(f"{KILL}{patch}\nbuild.build(fake.kernels('a'))"), env=environment, capture_output=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    for entry in cache.entries():
        cache.read(entry.directory)
    start = time.monotonic()
    whole(root, nvcc, "a")
    assert time.monotonic() - start < 5  # waits for no lock, nor for any time to pass
    assert nvcc.compiled == compilations


def test_sixteen_processes_eight_kernels(root: Path, nvcc: Stub) -> None:
    """B10, with twice as many: one compilation of each kernel."""
    environment = script_env(FAGEN_CACHE_DIR=str(root), FAGEN_NVCC=str(nvcc.path))
    body = "import sys\nfor a in build.build(fake.kernels(sys.argv[1]), jobs=2): cache.read(a.directory)"
    orders = [random.Random(index).sample("abcdefgh", 8) for index in range(16)]
    running = [
        subprocess.Popen([*script(body), "".join(order)], env=environment, stderr=subprocess.PIPE) for order in orders
    ]
    assert [(process.communicate(timeout=120)[1], process.returncode) for process in running] == [(b"", 0)] * 16
    assert nvcc.compiled == 8
    whole(root, nvcc, "abcdefgh")


def test_a_waiter_does_not_take_a_lock_that_was_removed(root: Path) -> None:
    """`fagen clean` removes an artifact's lock with it: whoever waits for that file must not believe to hold the lock
    while another holds the new file."""
    (root / ".locks").mkdir(parents=True)
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with cache.lock(root, "a"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.05)
            inside.remove(number)

    with cache.lock(root, "a"):
        waiters = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        waiters[0].start()
        time.sleep(0.1)  # it has opened the file that now goes
        (root / ".locks" / "a.lock").unlink()
        waiters[1].start()
        time.sleep(0.02)
    for waiter in waiters:
        waiter.join()
    assert most == [1, 1]


# Damage


@pytest.mark.parametrize("name", ["artifact.json", "kernel.cubin", "kernel.cu", "resources.json", "spec.json"])
def test_a_flipped_bit_anywhere_is_found(name: str, nvcc: Stub) -> None:
    """The directory is damaged, or, where a flip changes but the white space of the manifest, it reads the same."""
    (artifact,) = build.build(kernels("a"))
    expected = cache.read(artifact.directory)
    path = artifact.directory / name
    data = path.read_bytes()
    bits = random.Random(name).sample(range(8 * len(data)), min(8 * len(data), 1500))
    found = 0
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert cache.read(artifact.directory) == expected
        except cache.CorruptArtifact:
            found += 1
    assert found == len(bits) if name != "artifact.json" else found > 0.9 * len(bits)


@pytest.mark.parametrize(
    "field", ["digest", "slug", "entry", "arch", "target", "compiler", "flags", "binary", "format"]
)
def test_a_manifest_that_lies_is_built_again(field: str, root: Path, nvcc: Stub) -> None:
    (artifact,) = build.build(kernels("a"))
    manifest = artifact.directory / cache.MANIFEST
    content = json.loads(manifest.read_text())
    content[field] = {"digest": "f" * 64, "flags": ["-G"], "format": 0, "binary": "kernel.cu"}.get(field, "other")
    manifest.write_text(json.dumps(content))
    with pytest.warns(RuntimeWarning, match="is damaged"):
        (again,) = build.build(kernels("a"))
    assert not again.cached and again.digest == artifact.digest
    whole(root, nvcc, "a")


def test_an_artifact_of_another_key_gives_way(root: Path, nvcc: Stub) -> None:
    """Keys whose first digits are the same share a name: never is one taken for the other."""
    (artifact,) = build.build(kernels("a"))
    (other,) = build.build([make_kernel(text="another")])
    shutil.rmtree(artifact.directory)
    shutil.move(other.directory, artifact.directory)
    (again,) = build.build(kernels("a"))
    assert not again.cached and again.digest == artifact.digest
    assert cache.read(again.directory).digest == artifact.digest
    whole(root, nvcc, "a")


@pytest.mark.parametrize("left", [0.5, 0.9, 0.999])
def test_a_compiler_that_writes_a_part_of_its_file(left: float) -> None:
    """A library of real size, whose sections and segments reach to its end."""
    libraries = sorted(Path(sys.modules["struct"].__spec__.origin or "/").parent.glob("lib-dynload/*.so"))
    data = next((path.read_bytes() for path in libraries if path.read_bytes()[:6] == b"\x7fELF\x02\x01"), None)
    if data is None:
        pytest.skip("no library to cut")
    assert build._elf_symbols(data, 11)
    with pytest.raises((ValueError, IndexError, struct.error)):
        build._elf_symbols(data[: int(left * len(data))], 11)


def test_a_section_past_the_end() -> None:
    """Symbols first, then a section that was cut: the symbols alone do not make it whole."""
    data = bytearray(elf("fagen_fwd"))
    (table,) = struct.unpack_from("<Q", data, 0x28)
    struct.pack_into("<Q", data, table + 64 + 64 + 32, 10_000)  # size of the section of strings
    with pytest.raises(ValueError, match="are announced"):
        build._elf_symbols(bytes(data), 2)


# No space, no permission, no directory


def test_a_disk_too_full_for_the_compiler_s_message(root: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """B8: the compiler fails and says nothing, for its log is on the same disk. It is not the kernel that is wrong."""
    nvcc.path.write_text(nvcc.path.read_text().replace("echo compiled", "exit 1; echo", 1))
    monkeypatch.setattr(build, "_free_space", lambda folder: 0)
    with pytest.raises(CacheError, match=r"no space left in .*FAGEN_CACHE_DIR"):
        build.build(kernels("ab"))
    assert cache.list_artifacts() == []
    monkeypatch.undo()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts a small file system")
def test_a_small_disk(root: Path, nvcc: Stub) -> None:
    """B8: what fits is kept, the rest is one clear error; with room again all is built."""
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with pytest.raises(CacheError, match=r"no space left in .*FAGEN_CACHE_DIR") as caught:
            build.build(kernels("abcdef"))
        assert "\n" not in str(caught.value)
        for entry in cache.entries():
            cache.read(entry.directory)
        subprocess.run(["mount", "-o", "remount,size=16m", str(root)], check=True)
        whole(root, nvcc, "abcdef")
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EROFS])
def test_errors_of_the_file_system_say_what_to_do(
    code: int, root: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), str(root))

    for place in ("search_dirs", "staging", "seal", "publish"):
        with monkeypatch.context() as patch:
            patch.setattr(cache, place, failing)
            with pytest.raises(CacheError, match=f"{os.strerror(code)}.*FAGEN_CACHE_DIR"):
                build.build(kernels("a"))
    whole(root, nvcc, "a")


def test_a_cache_in_a_place_that_this_user_may_not_look_into(tmp_path_factory: pytest.TempPathFactory) -> None:
    """B11: as root left it in the environment of another user: kernels go to a directory of the user's own."""
    hidden = tmp_path_factory.mktemp("hidden")
    hidden.chmod(0o700)
    code = (
        "with warnings.catch_warnings(record=True): print(cache.build_dir('cuda'))\n"
        "try: print(cache.build_dir('emulate'))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "print(cache.list_artifacts(), cache.clean())"
    )
    if os.geteuid() != 0:
        hidden.chmod(0)
    done = run_as_other(code, FAGEN_CACHE_DIR=str(hidden / "cache"))
    hidden.chmod(0o700)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    cuda, emulated, listed = done.stdout.splitlines()
    assert str(hidden) not in cuda and Path(cuda).is_absolute()
    assert emulated.startswith("CacheError ") and "Permission denied" in emulated and "FAGEN_CACHE_DIR" in emulated
    assert listed == "[] (0, 0)"


@pytest.mark.parametrize("place", ["", ".locks", ".tmp"])
def test_a_cache_that_is_removed_during_a_build(
    place: str, root: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made anew; the kernel is right."""
    outcome = build._outcome
    removed: list[str] = []

    def remove(*arguments: Any) -> Any:
        if not removed:
            removed.append(place)
            while (root / place).exists():  # the other compiler may write there meanwhile
                shutil.rmtree(root / place, ignore_errors=True)
        return outcome(*arguments)

    monkeypatch.setattr(build, "_outcome", remove)
    build.build(kernels("ab"))
    whole(root, nvcc, "ab")


def test_a_working_directory_that_goes_before_ninja_starts(
    root: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    ninja = toolchain.find_ninja()

    def find() -> Path:
        shutil.rmtree(root / ".tmp", ignore_errors=True)
        monkeypatch.setattr(toolchain, "find_ninja", lambda: ninja)
        return ninja

    monkeypatch.setattr(toolchain, "find_ninja", find)
    build.build(kernels("a"))
    whole(root, nvcc, "a")
    monkeypatch.setattr(toolchain, "find_ninja", lambda: root / "no-ninja")
    with pytest.raises(ToolchainError, match="does not start"):
        build.build(kernels("b"))


@pytest.mark.parametrize("name", ["resources.json", "kernel.cubin", "artifact.json"])
def test_files_that_go_before_the_rename(name: str, root: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a hand that removes the cache file by file: never is a part of an artifact published."""
    publish = cache.publish
    removed: list[Path] = []

    def remove(staged: Path, *arguments: Any, **named: Any) -> cache.Artifact:
        if not removed:
            removed.append(staged)
            (staged / name).unlink()
            if name == "resources.json":  # before the manifest was written
                fields = json.loads((staged / cache.MANIFEST).read_text())
                (staged / cache.MANIFEST).unlink()
                cache.seal(staged, {key: fields[key] for key in fields if key not in ("format", "files", "sha256")})
        return publish(staged, *arguments, **named)

    monkeypatch.setattr(cache, "publish", remove)
    build.build(kernels("a"))
    assert nvcc.compiled == 2
    whole(root, nvcc, "a")


def test_a_rename_lost_to_one_that_is_gone(root: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """B10: the place is taken, and free again when one looks: the rename is tried again."""
    rename = Path.rename
    lost: list[Path] = []

    def lose(self: Path, target: Path) -> Path:
        if not lost:
            lost.append(self)
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", lose)
    build.build(kernels("a"))
    assert lost
    whole(root, nvcc, "a")


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_working_directory_that_goes_while_it_is_looked_at(
    comes_back: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ends last removes `.tmp`, and whoever comes next makes it: the cache can be written to all the time."""
    (root / ".tmp").mkdir(parents=True)
    access = os.access
    asked: list[Path] = []

    def remove(path: Path, mode: int) -> bool:
        if path == root / ".tmp" and not asked:
            asked.append(path)
            path.rmdir()
            allowed = access(path, mode)
            if comes_back:
                path.mkdir()
            return allowed
        return access(path, mode)

    monkeypatch.setattr(os, "access", remove)
    assert cache.build_dir("cuda") == root and (root / ".tmp").exists() == comes_back


def test_a_working_directory_that_goes_while_it_is_made(
    root: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It exists, so it is not made; and when one looks whether it is a directory, another process has removed it."""
    make = os.mkdir
    lost: list[str] = []

    def race(path: Any, *arguments: Any, **named: Any) -> None:
        if Path(path) == root / ".tmp" and not lost:
            lost.append(str(path))
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        make(path, *arguments, **named)

    monkeypatch.setattr(os, "mkdir", race)
    build.build(kernels("a"))
    assert lost
    whole(root, nvcc, "a")


def test_a_failure_is_forgotten_when_the_kernel_is_built(root: Path, nvcc: Stub) -> None:
    text = nvcc.path.read_text()
    nvcc.path.write_text(text.replace("echo compiled", "echo killed; exit 1; echo", 1))
    with pytest.raises(BuildError) as caught:
        build.build(kernels("ab"))
    assert caught.value.source is not None and caught.value.source.is_file()
    nvcc.path.write_text(text)
    build.build(kernels("a"))
    assert [entry.directory.parent.name for entry in cache.entries()] == ["cache", "failed"]  # that of b
    build.build(kernels("b"))
    whole(root, nvcc, "ab")


def test_a_listing_of_what_another_process_removes(root: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cleaners, and a listing, at once: each counts what it did itself, and none fails."""
    build.build(kernels("abc"))
    entry = cache._entry
    removed: list[Path] = []

    def race(directory: Path) -> cache.Entry | None:
        if not removed:
            removed.append(directory)
            shutil.rmtree(directory)
        return entry(directory)

    monkeypatch.setattr(cache, "_entry", race)
    assert len(cache.list_artifacts()) == 2
    removed.clear()
    assert cache.clean()[0] == 1
    assert cache.clean() == (0, 0)


def test_what_was_used_meanwhile_is_not_cleaned(root: Path, nvcc: Stub) -> None:
    """`clean` asks again once it holds the lock."""
    (artifact,) = build.build(kernels("a"))
    os.utime(artifact.directory, (1, 1))
    asked: list[float] = []

    def old(entry: cache.Entry) -> bool:
        asked.append(entry.used)
        os.utime(entry.directory)
        return entry.used == 1

    assert cache.clean(old) == (0, 0) and len(asked) == 2 and artifact.directory.is_dir()


def test_a_kernel_that_goes_before_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fagen clean` between look-up and load: it is built again. A library that is there and no library is not."""
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(in_memory, "_LOADED", {})
    find = in_memory.find_or_build
    broken = False
    calls: list[int] = []

    def race(*arguments: Any, **named: Any) -> Any:
        artifacts = find(*arguments, **named)
        calls.append(len(artifacts))
        if broken:
            artifacts[0].binary.write_bytes(b"no library")
        elif len(calls) == 1:
            shutil.rmtree(artifacts[0].directory)
        return artifacts

    monkeypatch.setattr(in_memory, "find_or_build", race)
    spec = fagen.AttentionSpec(head_dim=8)
    q = torch.ones(1, 3, 1, 8, dtype=torch.bfloat16)
    assert torch.equal(fagen.Attention(spec, arch="sm80", emulate=True)(q, q, q), q) and len(calls) == 2
    broken = True
    monkeypatch.setattr(in_memory, "_LOADED", {})
    with pytest.raises(LaunchError, match="cannot load"):
        fagen.Attention(fagen.AttentionSpec(head_dim=8, causal=True), arch="sm80", emulate=True)(q, q, q)
    assert len(calls) == 3


# All of it at random


def test_a_short_soak() -> None:
    """As `make soak`, with fewer rounds: each fault three times."""
    command = [sys.executable, "-m", "tests.soak", "--rounds", "36", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    counted = json.loads(done.stdout)
    assert set(counted.pop("rounds").values()) == {3} and counted.pop("seconds") > 0
    assert counted == dict.fromkeys(("wrong", "hang", "unreadable", "duplicate", "unclear"), 0)
