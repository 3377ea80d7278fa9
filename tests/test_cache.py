"""The cache: keys, places, damage, trust, listing and cleaning."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_toolchain import (
    FakeSpec,
    Stub,
    kernels,
    make_kernel,
    render,
    run_as_other,
)
from hypothesis import given
from hypothesis import strategies as st

from fagen import build, cache
from fagen.arch import resolve
from fagen.errors import CacheError

SLUGS = st.text(min_size=1, max_size=400)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(folder))
    monkeypatch.setattr("fagen.render.render", render)
    return folder


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    monkeypatch.setenv("FAGEN_COMPILER", "nvcc")
    return stub


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub(tmp_path / "bin" / "c++", version="c++ (Test) 2", host=True)
    monkeypatch.setenv("FAGEN_CXX", str(stub.path))
    return stub


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that other users can reach, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="fagen-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def test_digest_depends_on_everything_that_decides_the_binary() -> None:
    base = cache.digest("source", ["-a", "-b"], "sm90", "nvcc 13")
    assert base == cache.digest("source", ("-a", "-b"), "sm90", "nvcc 13")
    others = [
        cache.digest("source ", ["-a", "-b"], "sm90", "nvcc 13"),
        cache.digest("source", ["-a -b"], "sm90", "nvcc 13"),
        cache.digest("source", ["-b", "-a"], "sm90", "nvcc 13"),
        cache.digest("source", ["-a", "-b"], "sm80", "nvcc 13"),
        cache.digest("source", ["-a", "-b"], "sm90", "nvcc 14"),
        cache.digest("source", ["-a"], "-b", "sm90"),
    ]
    assert len({base, *others}) == len(others) + 1


@given(SLUGS)
def test_directory_names_are_safe(slug: str) -> None:
    """B12: any slug gives a component that every file system, ninja and shell takes."""
    name = cache.directory_name(slug, "0123456789abcdef")
    assert len(f"{name}.lock".encode()) <= 255
    assert name.endswith("-0123456789ab") and name.isascii()
    assert not set(name) & set("/ $:'\"\\\n") and name[0] not in ".-"


def test_long_slugs_stay_apart() -> None:
    slug = "x" * 300
    assert cache.directory_name(slug, "a" * 64) != cache.directory_name(slug, "b" * 64)


def test_cache_dir_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path))
    assert cache.cache_dir() == tmp_path
    monkeypatch.delenv("FAGEN_CACHE_DIR", raising=False)
    monkeypatch.setattr(cache, "_checkout", lambda: tmp_path / "tree")
    assert cache.cache_dir() == tmp_path / "tree" / "generated"
    monkeypatch.setattr(cache, "_checkout", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.cache_dir().name == "fagen"
    assert tmp_path in cache.cache_dir().parents
    monkeypatch.setattr(cache, "_user_dir", lambda: None)
    assert cache.cache_dir() == Path(tempfile.gettempdir()) / f"fagen-{os.geteuid()}"


def test_reads_back_what_was_built(root: Path, nvcc: Stub) -> None:
    (artifact,) = build.build(kernels("a"))
    found = cache.read(artifact.directory)
    assert found == cache.list_artifacts()[0]
    assert (found.slug, found.arch, found.target, found.entry) == (
        "fwd_a_sm90",
        "sm90",
        "cuda",
        "fagen_fwd",
    )
    assert found.spec == {"name": "a"}
    assert found.resources == cache.Resources(registers=42, spill_stores=8, spill_loads=4, stack=16, smem=256)
    assert found.compiler == "nvcc 13.0.88 cuda_13.0.r13.0/compiler.1_0"
    assert found.directory.name == f"fwd_a_sm90-{found.digest[:12]}"
    assert found.source.read_text() == render(kernels("a")[0], "cuda")
    assert found.size == found.binary.stat().st_size
    assert "-arch=sm_90" in found.log and "Used 42 registers" in found.log
    files = {path.name for path in found.directory.iterdir()}
    assert files == {
        "kernel.cu",
        "kernel.cubin",
        "spec.json",
        "resources.json",
        "build.log",
        "artifact.json",
    }


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "kernel.cubin").write_bytes(b""),
        lambda folder: os.truncate(folder / "kernel.cubin", (folder / "kernel.cubin").stat().st_size // 2),
        lambda folder: (folder / "kernel.cubin").write_bytes(b"x" * (folder / "kernel.cubin").stat().st_size),
        lambda folder: (folder / "kernel.cubin").unlink(),
        lambda folder: (folder / "artifact.json").unlink(),
        lambda folder: (folder / "artifact.json").write_text('{"format": 1'),
        lambda folder: (folder / "artifact.json").write_text("[]"),
        lambda folder: (folder / "resources.json").unlink(),
        lambda folder: [path.unlink() for path in folder.iterdir()],
    ],
)
def test_damaged_artifact_is_built_again(damage, root: Path, nvcc: Stub) -> None:  # type: ignore[no-untyped-def]
    """B8: with one warning, and the result is whole."""
    (artifact,) = build.build(kernels("a"))
    damage(artifact.directory)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (again,) = build.build(kernels("a"))
    assert len(caught) == 1 and "is damaged" in str(caught[0].message)
    assert nvcc.compiled == 2 and not again.cached
    assert cache.read(again.directory).digest == artifact.digest
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build.build(kernels("a"))[0].cached


def test_an_artifact_of_another_format_is_not_read(root: Path, nvcc: Stub) -> None:
    (artifact,) = build.build(kernels("a"))
    manifest = json.loads((artifact.directory / "artifact.json").read_text())
    (artifact.directory / "artifact.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(cache.CorruptArtifact, match="format 99"):
        cache.read(artifact.directory)
    assert cache.list_artifacts() == []


def test_publish_when_another_was_first(root: Path, nvcc: Stub, tmp_path: Path) -> None:
    """B10: the loser of the race uses the winner's; a damaged winner gives way."""
    (winner,) = build.build(kernels("a"))

    def stage() -> Path:
        staged = Path(tempfile.mkdtemp(dir=root)) / "0"
        staged.mkdir()
        for name in (
            "kernel.cu",
            "kernel.cubin",
            "spec.json",
            "resources.json",
            "build.log",
        ):
            (staged / name).write_bytes((winner.directory / name).read_bytes())
        (staged / "kernel.cubin").write_bytes(b"the loser's")
        manifest = json.loads((winner.directory / "artifact.json").read_text())
        cache.seal(
            staged,
            {name: value for name, value in manifest.items() if name not in ("files", "format", "sha256")},
        )
        return staged

    assert cache.publish(stage(), root, winner.directory.name).binary.read_bytes() == winner.binary.read_bytes()
    assert cache.publish(stage(), root, winner.directory.name, replace=True).binary.read_bytes() == b"the loser's"
    winner.binary.write_bytes(b"")
    assert cache.publish(stage(), root, winner.directory.name).binary.read_bytes() == b"the loser's"


def test_lock_excludes(root: Path) -> None:
    (root / ".locks").mkdir(parents=True)
    with cache.lock(root, "a") as first, cache.lock(root, "a", wait=False) as second:
        assert first and not second
    order: list[str] = []

    def wait() -> None:
        with cache.lock(root, "a"):
            order.append("waiter")

    with cache.lock(root, "a"):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        order.append("holder")
    thread.join()
    assert order == ["holder", "waiter"]


def test_staging_of_a_killed_process_is_swept(root: Path) -> None:
    root.mkdir()
    left = root / ".tmp" / "build-dead"
    left.mkdir(parents=True)
    with cache.staging(root) as alive:
        assert not left.exists()
        left.mkdir()
        for time_of in (1.0, time.time(), time.time() + 1e6):  # no clock tells what is in use
            os.utime(alive, (time_of, time_of))
            cache.sweep(root)
            assert alive.is_dir() and not left.exists()
    assert not (root / ".tmp").exists()


def test_list_and_clean(root: Path, nvcc: Stub) -> None:
    build.build(kernels("abc"))
    root.joinpath("notes.txt").write_text("mine")
    root.joinpath("photos-0123456789ab").mkdir()
    root.joinpath("photos-0123456789ab", "me.jpg").write_text("mine")
    assert [artifact.slug for artifact in cache.list_artifacts()] == [
        "fwd_a_sm90",
        "fwd_b_sm90",
        "fwd_c_sm90",
    ]
    removed, freed = cache.clean(lambda entry: entry.directory.name.startswith("fwd_b_sm90-"))
    assert removed == 1 and freed > 500
    assert [artifact.slug for artifact in cache.list_artifacts()] == [
        "fwd_a_sm90",
        "fwd_c_sm90",
    ]
    (cache.list_artifacts()[0].directory / "artifact.json").unlink()
    assert cache.clean()[0] == 2
    assert cache.clean() == (0, 0)
    left = {path.name for path in root.iterdir()} - {".locks"}
    assert left == {"notes.txt", "photos-0123456789ab"}


def test_clean_without_a_cache(root: Path) -> None:
    assert cache.clean() == (0, 0)
    assert cache.list_artifacts() == []


def test_warm_and_read_only(open_folder: Path, root: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """B11: what is there is found; what is not goes to a directory of the user's own, with one warning."""
    shared = open_folder / "cache"
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(shared))
    stub = Stub(open_folder / "nvcc")
    for path in open_folder.iterdir():
        path.chmod(0o777 if path.name == "nvcc" else 0o666)
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    build.build(kernels("a"))
    (open_folder / "own").mkdir()
    (open_folder / "own").chmod(0o777)
    stub.count_file.chmod(0o666)
    shared.chmod(0o555)
    code = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    result = build.build(fake.kernels({names!r}))
print(json.dumps([[str(a.directory), a.cached] for a in result]))
print(json.dumps([str(w.message) for w in caught]))
"""
    environment = {
        "FAGEN_CACHE_DIR": str(shared),
        "FAGEN_NVCC": str(stub.path),
        "TMPDIR": str(open_folder / "own"),
    }
    warm = run_as_other(code.format(names="a"), **environment)
    assert warm.returncode == 0, warm.stderr
    ((directory, cached),), messages = map(json.loads, warm.stdout.splitlines())
    assert cached and not messages and Path(directory).parent == shared
    cold = run_as_other(code.format(names="b"), **environment)
    assert cold.returncode == 0, cold.stderr
    ((directory, cached),), messages = map(json.loads, cold.stdout.splitlines())
    assert not cached and Path(directory).parents[1] == open_folder / "own"
    assert len(messages) == 1 and "FAGEN_CACHE_DIR" in messages[0] and str(shared) in messages[0]
    again = run_as_other(code.format(names="ab"), **environment)
    both, messages = map(json.loads, again.stdout.splitlines())
    assert [cached for _, cached in both] == [True, True] and not messages
    shared.chmod(0o755)


def test_nowhere_to_write(open_folder: Path) -> None:
    """B11: then the error says which variable to set."""
    (open_folder / "cache").mkdir(mode=0o555)
    (open_folder / "tmp").mkdir(mode=0o555)
    code = "print(cache.tempfile.gettempdir.__name__); cache.tempfile.tempdir = {0!r}; cache.build_dir('cuda')"
    done = run_as_other(
        code.format(str(open_folder / "tmp")),
        FAGEN_CACHE_DIR=str(open_folder / "cache"),
    )
    assert done.returncode != 0
    assert "CacheError: no directory to keep kernels in" in done.stderr and "Set FAGEN_CACHE_DIR" in done.stderr


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_library_that_others_can_write_is_refused(mode: int, root: Path, host: Stub) -> None:
    (artifact,) = build.build(kernels("a"), emulate=True)
    for path in (artifact.binary, artifact.directory, root):
        old = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        with pytest.raises(CacheError, match=f"{path} is writable by everybody.*chmod go-w"):
            build.build(kernels("a"), emulate=True)
        path.chmod(old)
    assert build.build(kernels("a"), emulate=True)[0].cached


def test_library_of_a_group(root: Path, host: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of several users is refused; the private group of umask 002 is not."""
    build.build(kernels("a"), emulate=True)
    root.chmod(0o775)
    monkeypatch.setattr(cache, "_is_private_group", lambda gid, uid: False)
    with pytest.raises(CacheError, match=r"writable by group \d+"):
        build.build(kernels("a"), emulate=True)
    monkeypatch.setattr(cache, "_is_private_group", lambda gid, uid: True)
    assert build.build(kernels("a"), emulate=True)[0].cached


def test_library_of_another_user_is_refused(root: Path, host: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build(kernels("a"), emulate=True)
    if os.geteuid() == 0:
        os.chown(root, 54321, 54321)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(CacheError, match=r"belongs to user .*FAGEN_CACHE_DIR"):
        build.build(kernels("a"), emulate=True)


def test_default_cache_of_another_user_gives_way(
    root: Path, host: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout that belongs to somebody else, as in a container: the kernels go to the user's own directory."""
    monkeypatch.delenv("FAGEN_CACHE_DIR", raising=False)
    tree = tmp_path / "tree"
    (tree / "generated").mkdir(parents=True)
    (tree / "generated").chmod(0o777)
    monkeypatch.setattr(cache, "_checkout", lambda: tree)
    monkeypatch.setattr(cache, "_user_dir", lambda: tmp_path / "user")
    with pytest.warns(RuntimeWarning, match="kernels are built in .*user"):
        (artifact,) = build.build(kernels("a"), emulate=True)
    assert artifact.directory.parent == tmp_path / "user"
    assert build.build(kernels("a"), emulate=True)[0].cached


def test_umask_leaves_nothing_writable(root: Path, host: Stub) -> None:
    old = os.umask(0)
    try:
        (artifact,) = build.build(kernels("a"), emulate=True)
    finally:
        os.umask(old)
    for path in (root, artifact.directory, *artifact.directory.iterdir()):
        assert not path.stat().st_mode & 0o022, path


def test_find_by_source(root: Path, nvcc: Stub) -> None:
    kernel = make_kernel(spec=FakeSpec("a"))
    source = render(kernel, "cuda")
    assert cache.find_by_source(kernel.slug, source, "sm90") is None
    (artifact,) = build.build([kernel])
    os.utime(artifact.directory, (1, 1))
    assert cache.find_by_source(kernel.slug, source, "sm90") == cache.read(artifact.directory)
    assert artifact.directory.stat().st_mtime > 1, "that is a use, as `find` of the key is"
    assert cache.find_by_source(kernel.slug, source + " ", "sm90") is None
    assert cache.find_by_source(kernel.slug, source, resolve("sm80").name) is None
