"""Bundles: what they hold, that nothing damaged or foreign is taken from them, and that `load` needs no compiler."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_toolchain import FakeSpec, Stub, elf, kernels, make_kernel, render
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import python_path

from fagen import build, bundle, cache, toolchain
from fagen.arch import resolve
from fagen.cache import Artifact, BundledArtifact
from fagen.cli import main
from fagen.errors import CacheError, SpecError, ToolchainError

ROOT = Path(__file__).resolve().parent.parent
X86_64 = 62  # ELF machine


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No bundles and no variables but those of the test."""
    for name in ("FAGEN_BUNDLES", "FAGEN_JIT", "FAGEN_LAUNCHER", "FAGEN_ARCH", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bundle, "_installed", lambda: ())
    bundle._read.cache_clear()
    yield
    bundle._read.cache_clear()


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    monkeypatch.setenv("FAGEN_COMPILER", "nvcc")
    return stub


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fagen.render.render", render)


@pytest.fixture
def made(tmp_path: Path, nvcc: Stub, fake: None) -> Path:
    """A bundle with the kernels a and b."""
    bundle.write(tmp_path / "kernels.zip", build.build(kernels("ab")))
    return tmp_path / "kernels.zip"


@pytest.fixture
def bare(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundle, on a machine that has it, an empty cache and no compiler."""
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FAGEN_BUNDLES", str(made))

    def none() -> None:
        raise ToolchainError("no CUDA compiler was found")

    monkeypatch.setattr(toolchain, "find_cuda_compiler", none)
    return made


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path: Path, files: dict[str, bytes] | list[tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items() if isinstance(files, dict) else files:
            archive.writestr(name, data)
    bundle._read.cache_clear()


def image(name: str) -> bytes:
    """What the stub compiler makes of that kernel."""
    return elf("fagen_fwd") + render(kernels(name)[0], "cuda").encode()


def change(path: Path, edit: Callable[[Any], Any]) -> None:
    """Edits the manifest."""
    files = members(path)
    document = json.loads(files[bundle.MANIFEST])
    edit(document)
    rewrite(path, files | {bundle.MANIFEST: json.dumps(document).encode()})


# What load takes


def test_load_needs_no_compiler_and_no_cache(bare: Path, tmp_path: Path) -> None:
    first, second = build.find_or_build(kernels("ba"))
    assert isinstance(first, BundledArtifact) and isinstance(second, BundledArtifact)
    assert (first.slug, second.slug) == ("fwd_b_sm90", "fwd_a_sm90")
    assert first.image == image("b") and first.size == len(first.image)
    assert first.resources == cache.Resources(registers=42, spill_stores=8, spill_loads=4, stack=16, smem=256)
    assert (first.spec, first.arch, first.target, first.entry) == ({"name": "b"}, "sm90", "cuda", "fagen_fwd")
    assert first.compiler == "nvcc 13.0.88 cuda_13.0.r13.0/compiler.1_0" and first.compiler in first.log
    assert first.directory.parent == bare and first.built > 0
    assert not (tmp_path / "empty").exists(), "nothing is unpacked"


def test_what_is_launched_are_the_bytes_that_were_checked(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen import kernels as in_memory

    loaded: list[Any] = []
    monkeypatch.setattr(in_memory, "CudaKernel", lambda *given, **_: loaded.append(given))
    monkeypatch.setattr(in_memory, "_LOADED", {})
    (artifact,) = build.find_or_build(kernels("a"))

    class Plan:
        entry, smem_bytes, overlaps = "fagen_fwd", 0, False

    bare.unlink()
    in_memory.Kernel(Plan(), artifact, 0)  # type: ignore[arg-type]
    assert loaded == [(image("a"), "fagen_fwd", 0, 0)]


def test_the_cache_comes_before_bundles_and_bundles_before_the_compiler(
    made: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAGEN_BUNDLES", str(made))
    assert not isinstance(build.find_or_build(kernels("a"))[0], BundledArtifact)
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "empty"))
    found = build.find_or_build(kernels("acb"))
    assert [isinstance(artifact, BundledArtifact) for artifact in found] == [True, False, True]
    assert nvcc.compiled == 3, "only c was compiled again"
    monkeypatch.setenv("FAGEN_JIT", "0")
    assert isinstance(build.find_or_build(kernels("b"))[0], BundledArtifact)


@pytest.mark.parametrize("other", [{"text": "int y;"}, {"arch": resolve("sm80")}, {"slug": "fwd_c_sm90"}])
def test_only_the_same_source_for_the_same_architecture_serves(other: dict[str, Any], bare: Path) -> None:
    kernel = make_kernel(**{"slug": "fwd_a_sm90", "spec": FakeSpec("a"), **other})
    with pytest.raises(ToolchainError, match="no CUDA compiler"):
        build.find_or_build([kernel])


def test_kernels_for_the_cpu_never_come_from_a_bundle(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Stub(tmp_path / "bin" / "c++", version="c++ (Test) 2", host=True)
    monkeypatch.setenv("FAGEN_CXX", str(host.path))
    monkeypatch.setattr(bundle, "search", lambda: pytest.fail("looked for one"))
    (artifact,) = build.find_or_build(kernels("a"), emulate=True)
    assert not isinstance(artifact, BundledArtifact) and host.compiled == 1
    with pytest.raises(CacheError, match="is a library for the CPU"):
        bundle.write(tmp_path / "cpu.zip", [artifact])
    assert not (tmp_path / "cpu.zip").exists()


def test_directories_of_bundles(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    bare.rename(folder / "one.zip")
    (folder / "notes.txt").write_text("mine")
    empty = tmp_path / "none"
    empty.mkdir()
    monkeypatch.setenv("FAGEN_BUNDLES", os.pathsep.join(["", str(empty), str(folder)]))
    assert build.find_or_build(kernels("a"))[0].directory.parent == folder / "one.zip"
    monkeypatch.setenv("FAGEN_BUNDLES", str(tmp_path / "lost"))
    with pytest.raises(SpecError, match=r"FAGEN_BUNDLES: .*lost is neither a bundle nor a directory"):
        build.find_or_build(kernels("a"))


@pytest.mark.parametrize(
    ("driver", "compiled", "ptx", "serves"),
    [
        (None, "13.0", False, True),
        ((13, 0), "13.9", False, True),  # a driver loads cubins of any release of its major version
        ((12, 9), "13.0", False, False),
        ((13, 0), "13.1", True, False),  # but PTX up to its own only
        ((13, 1), "13.1", True, True),
        ((14, 0), "13.1", False, True),
    ],
)
def test_a_kernel_that_the_driver_cannot_load_does_not_serve(
    driver: tuple[int, int] | None, compiled: str, ptx: bool, serves: bool, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ptx:
        _claim(bare, "kernel.ptx", b".visible .entry fagen_fwd(")
    change(bare, lambda document: document["kernels"][0].update(compiler=f"nvcc {compiled}.88 cuda_{compiled}"))
    monkeypatch.setattr(bundle, "driver_version", lambda: driver)
    if serves:
        assert isinstance(build.find_or_build(kernels("a"))[0], BundledArtifact)
        return
    with pytest.raises(ToolchainError, match="no CUDA compiler"):
        build.find_or_build(kernels("a"))


# FAGEN_JIT=0


def test_a_missing_variant_is_named_with_the_nearest_and_the_command(
    nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B15, with real specs: in the cache and in a bundle, the nearest first; other kinds are no substitutes."""
    from fagen.plan import plan
    from fagen.spec import AttentionSpec

    def forward(arch: str = "sm80", **fields: Any) -> Any:
        return plan(AttentionSpec(**fields), resolve(arch))[0]

    bundle.write(tmp_path / "shipped.zip", build.build([forward(head_dim=128, causal=True)]))
    cache.clean()
    build.build(
        [
            forward(head_dim=64, causal=True, softcap=True),
            forward(head_dim=128, softcap=True, window=True),
            forward("sm90a", head_dim=64),
        ]
    )
    monkeypatch.setenv("FAGEN_BUNDLES", str(tmp_path / "shipped.zip"))
    monkeypatch.setenv("FAGEN_JIT", "0")
    with pytest.raises(CacheError) as caught:
        build.find_or_build([forward(head_dim=128, causal=True, softcap=True)])
    message = str(caught.value)
    assert message.startswith("fwd_hdim128_bf16_causal_softcap_sm80 is not built for nvcc 13.0.88")
    assert "`fagen build --head-dim 128 --causal --softcap --arch sm80`" in message and "\n" not in message
    shipped = f"fwd_hdim128_bf16_causal_sm80 (in {tmp_path / 'shipped.zip'})"
    near = ", ".join([shipped, "fwd_hdim64_bf16_causal_softcap_sm80", "fwd_hdim128_bf16_window_softcap_sm80"])
    assert message.endswith(f"nearest of what is built: {near}")
    (backward,) = (kernel for kernel in plan(AttentionSpec(head_dim=64, backward=True), resolve("sm80"))
                   if kernel.kind == "bwd")  # fmt: skip
    with pytest.raises(CacheError, match=r"bwd_hdim64_bf16_backward_sm80 is not built .* no kernel of its kind"):
        build.find_or_build([backward])


def test_the_same_variant_of_another_source_is_called_so(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_JIT", "0")
    kernel = make_kernel(slug="fwd_a_sm90", spec=FakeSpec("a"), text="int y;")
    with pytest.raises(CacheError, match=r"fwd_a_sm90 is not built, .*fwd_a_sm90 \(by nvcc .*, of other templates\)"):
        build.find_or_build([kernel])


# What is written


def test_the_same_kernels_give_the_same_bytes(
    made: Path, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever and whenever they were built."""
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "elsewhere"))
    artifacts = build.build(kernels("ab"))
    assert nvcc.compiled == 4
    bundle.write(tmp_path / "again.zip", [*reversed(artifacts), *artifacts])
    assert (tmp_path / "again.zip").read_bytes() == made.read_bytes()
    names = {f"{artifact.directory.name}/{name}" for artifact in artifacts for name in ("kernel.cu", "kernel.cubin")}
    assert set(members(made)) == {bundle.MANIFEST} | names
    document = json.loads(members(made)[bundle.MANIFEST])
    assert [entry["digest"] for entry in document["kernels"]] == [artifact.digest for artifact in artifacts]
    assert document["kernels"][0]["resources"]["registers"] == 42


def test_parts_merge_into_the_whole(made: Path, tmp_path: Path) -> None:
    a, b = build.build(kernels("ab"))
    parts = [bundle.write(tmp_path / f"{index}.zip", part) for index, part in enumerate(([b], [], [a, b]))]
    bundle.merge(tmp_path / "merged.zip", parts)
    assert (tmp_path / "merged.zip").read_bytes() == made.read_bytes()


def test_two_binaries_of_one_digest_do_not_merge(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.zip"
    other.write_bytes(made.read_bytes())
    files = members(other)
    document = json.loads(files[bundle.MANIFEST])
    path = next(name for name in files if name.endswith(".cubin"))
    files[path] += b"\0"
    described = {"bytes": len(files[path]), "sha256": hashlib.sha256(files[path]).hexdigest()}
    document["kernels"][0]["binary"] |= described
    rewrite(other, files | {bundle.MANIFEST: json.dumps(document).encode()})
    with pytest.raises(CacheError, match=r"fwd_a_sm90: .*kernels.zip and .*other.zip have two binaries of one digest"):
        bundle.merge(tmp_path / "merged.zip", [bundle.read(made), bundle.read(other)])
    assert not (tmp_path / "merged.zip").exists()


def test_a_damaged_artifact_is_not_bundled(made: Path, tmp_path: Path) -> None:
    (artifact,) = build.build(kernels("a"))
    artifact.binary.write_bytes(b"x" * artifact.size)
    with pytest.raises(CacheError, match=r"is damaged .* build it again"):
        bundle.write(tmp_path / "new.zip", [artifact])
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "bin", "kernels.zip"}


def test_a_full_disk_leaves_the_old_bundle(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, listing = made.read_bytes(), sorted(path.name for path in tmp_path.iterdir())

    def full(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bundle, "_add", full)
    for name in ("kernels.zip", "acme-1.0-py3-none-any.whl"):
        with pytest.raises(CacheError, match=f"{name} was not written: no space left on device"):
            bundle.write(tmp_path / name, build.build(kernels("a")))
    assert made.read_bytes() == before and sorted(path.name for path in tmp_path.iterdir()) == listing


@pytest.mark.parametrize(
    "name", ["kernels.tar", "kernels", "kernels.whl", "a b-1.0-py3-none-any.whl", "no/kernels.zip"]
)
def test_names_that_no_bundle_has(name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"ends in .zip|a wheel's name|there is no directory"):
        bundle.check_output(tmp_path / name)


# Damage and malice


def _host_library(document: Any) -> None:
    document["kernels"][0]["binary"]["name"] = "kernel.so"


MANIFESTS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda d: d.clear(), "malformed, format: field required"),
    (lambda d: d.update(format=2), "has format 2, this fagen reads 1"),
    (lambda d: d.pop("kernels"), "malformed, kernels: field required"),
    (lambda d: d.update(hook="rm -rf"), "malformed, hook: extra inputs"),
    (lambda d: d["kernels"][0].pop("digest"), "malformed, kernels.0.digest"),
    (lambda d: d["kernels"][0].update(digest="../" * 21 + "x"), "malformed, kernels.0.digest"),
    (lambda d: d["kernels"][0].update(slug="../../evil"), "malformed, kernels.0.slug"),
    (lambda d: d["kernels"][0].update(slug="a\n"), "malformed, kernels.0.slug"),
    (lambda d: d["kernels"][0].update(entry="f; rm"), "malformed, kernels.0.entry"),
    (lambda d: d["kernels"][0].update(resources={"registers": "many"}), "malformed, kernels.0.resources.registers"),
    (lambda d: d["kernels"][0]["binary"].update(name="../kernel.cubin"), "malformed, kernels.0.binary.name"),
    (lambda d: d["kernels"][0]["binary"].update(name="/etc/passwd"), "malformed, kernels.0.binary.name"),
    (_host_library, "malformed, kernels.0.binary.name"),
    (lambda d: d["kernels"][0]["binary"].update(name="kernel.cu"), "has kernel.cu as source, kernel.cu as binary"),
    (lambda d: d["kernels"][0]["binary"].update(bytes=-1), "malformed, kernels.0.binary.bytes"),
    (lambda d: d["kernels"][0]["binary"].update(bytes=10**12), "malformed, kernels.0.binary.bytes"),
    (lambda d: d["kernels"][0]["binary"].update(sha256="0"), "malformed, kernels.0.binary.sha256"),
    (lambda d: d["kernels"].append(d["kernels"][0]), "has a file or a kernel twice"),
    (lambda d: d["kernels"].pop(), "is not in its manifest"),
]


def test_a_manifest_that_is_not_one(bare: Path) -> None:
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 100_000):
        rewrite(bare, members(bare) | {bundle.MANIFEST: content})
        with pytest.raises(
            CacheError, match=r"fagen-bundle.json is malformed, .*make it with `fagen bundle`"
        ) as caught:
            build.find_or_build(kernels("a"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("edit", "message"), MANIFESTS)
def test_a_malformed_manifest_is_refused(edit: Callable[[Any], Any], message: str, bare: Path, tmp_path: Path) -> None:
    change(bare, edit)
    with pytest.raises(CacheError, match=message) as caught:
        build.find_or_build(kernels("a"))
    assert str(bare) in str(caught.value) and "\n" not in str(caught.value)
    assert main(["bundle", "--merge", str(bare), "-o", str(tmp_path / "all.zip")]) == 1
    assert not (tmp_path / "all.zip").exists()


@pytest.mark.parametrize(
    "name", ["../../evil", "/tmp/evil", "fwd_a_sm90-0123456789ab/../../evil", "..\\evil", "setup.py"]
)
def test_a_file_that_the_manifest_does_not_name_is_refused(name: str, bare: Path, tmp_path: Path) -> None:
    """Zip slip, or a passenger. Nothing is unpacked anyway."""
    before = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
    rewrite(bare, members(bare) | {name: b"evil"})
    with pytest.raises(CacheError, match="is not in its manifest"):
        build.find_or_build(kernels("a"))
    assert sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts) == before


def test_a_file_twice_or_missing_is_refused(bare: Path) -> None:
    files = members(bare)
    with pytest.warns(UserWarning, match="Duplicate name"):
        rewrite(bare, [*files.items(), list(files.items())[-1]])
    with pytest.raises(CacheError, match="has a file or a kernel twice"):
        build.find_or_build(kernels("a"))
    rewrite(bare, list(files.items())[:-1])
    with pytest.raises(CacheError, match=r"kernel.cu.* is missing"):
        build.find_or_build(kernels("a"))


def _claim(path: Path, name: str, data: bytes) -> None:
    """Puts `data` in place of the binary of kernel a, with a manifest that says so."""
    files = members(path)
    document = json.loads(files[bundle.MANIFEST])
    entry = document["kernels"][0]
    folder = cache.directory_name(entry["slug"], entry["digest"])
    del files[f"{folder}/{entry['binary']['name']}"]
    entry["binary"] = {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite(path, files | {f"{folder}/{name}": data, bundle.MANIFEST: json.dumps(document).encode()})


def test_only_code_for_gpus_is_taken(bare: Path) -> None:
    """However well its checksums match."""
    library = bytearray(elf("fagen_fwd"))
    struct.pack_into("<H", library, 18, X86_64)
    for name, data, message in (
        ("kernel.cubin", bytes(library), r"code for a CPU \(ELF machine 62\)"),
        ("kernel.cubin", b"#!/bin/sh\n" * 20, "is not a cubin"),
        ("kernel.cubin", elf("fagen_fwd")[:20], "is not a cubin"),
        ("kernel.ptx", b".visible .entry other(", "is not PTX with an entry fagen_fwd"),
    ):
        _claim(bare, name, data)
        with pytest.raises(CacheError, match=message):
            build.find_or_build(kernels("a"))
        assert build.find_or_build(kernels("b")), "the others are whole"
    _claim(bare, "kernel.ptx", b".version 9.0\n.visible .entry fagen_fwd(")
    (artifact,) = build.find_or_build(kernels("a"))
    assert isinstance(artifact, BundledArtifact) and artifact.image.startswith(b".version")


def test_a_changed_file_does_not_match_its_checksum(bare: Path) -> None:
    files = members(bare)
    name = next(name for name in files if name.startswith("fwd_a") and name.endswith(".cubin"))
    rewrite(bare, files | {name: files[name][:-1] + b"\1"})
    with pytest.raises(CacheError, match=r"kernel.cubin does not match its checksum"):
        build.find_or_build(kernels("a"))
    rewrite(bare, files | {name: files[name] + b"\1"})
    with pytest.raises(CacheError, match=r"kernel.cubin has \d+ bytes, not \d+"):
        build.find_or_build(kernels("a"))


@pytest.mark.parametrize("content", [b"", b"PK", b"\x7fELF" * 30, b"PK\5\6" + bytes(18)])
def test_what_is_no_zip_file(content: bytes, bare: Path) -> None:
    bare.write_bytes(content)
    with pytest.raises(CacheError, match=r"kernels.zip is not a (whole zip file|bundle).*fagen bundle"):
        build.find_or_build(kernels("a"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_gives_another_kernel(data: st.DataObject, bare: Path) -> None:
    """A byte changed, or an end lost: the same kernel, or one clear error."""
    kept = bare.with_suffix(".kept")
    if not kept.exists():
        kept.write_bytes(bare.read_bytes())
    whole = kept.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    bare.write_bytes(data.draw(st.sampled_from([damaged, whole[:place]])))
    bundle._read.cache_clear()
    try:
        (artifact,) = build.find_or_build(kernels("a"))
    except (CacheError, ToolchainError) as error:  # the latter where the damage is in a slug or a checksum of a source
        assert "\n" not in str(error)
    else:
        assert isinstance(artifact, BundledArtifact) and artifact.image == image("a")


# Installed packages


def test_a_wheel_is_found_once_it_is_installed(made: Path, tmp_path: Path) -> None:
    """By its entry point, without an import of the package and without a compiler."""
    wheel = tmp_path / "acme_kernels-1.0-py3-none-any.whl"
    bundle.write(wheel, build.build(kernels("ab")))
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    subprocess.run(pip, check=True)
    assert (target / "acme_kernels" / "kernels.zip").read_bytes() == made.read_bytes()
    (target / "broken-1.dist-info").mkdir()
    (target / "broken-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (target / "broken-1.dist-info" / "entry_points.txt").write_text("[fagen.bundles]\nbroken = nowhere\n")
    program = (
        "import sys, warnings, fake_toolchain as fake, fagen.render\n"
        "from fagen import build, toolchain\n"
        "from fagen.errors import ToolchainError\n"
        "fagen.render.render = fake.render\n"
        "def none(): raise ToolchainError('none')\n"
        "toolchain.find_cuda_compiler = none\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    found = build.find_or_build(fake.kernels('ab'))\n"
        "print(*(artifact.directory.parent for artifact in found))\n"
        "print(*(warning.message for warning in caught))\n"
        "assert 'acme_kernels' not in sys.modules\n"
    )
    environment = os.environ | {
        "PYTHONPATH": python_path(target, ROOT, ROOT / "tests"),
        "FAGEN_CACHE_DIR": str(tmp_path / "empty"),
    }
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found, warned = done.stdout.splitlines()
    assert found.split() == [str(target / "acme_kernels" / "kernels.zip")] * 2
    assert warned.count("entry point") == 1 and "broken of fagen.bundles names nowhere" in warned


# The command

MATRIX = """
arch = "sm80"
[[variants]]
head_dim = [64, 128]
causal = [false, true]
softcap = [false, true]
"""


@pytest.fixture
def variants(tmp_path: Path) -> str:
    (tmp_path / "variants.toml").write_text(MATRIX)
    return str(tmp_path / "variants.toml")


def test_machines_build_shards_and_merge_them(
    variants: str, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []
    for index in (1, 2, 3):  # each with a cache of its own
        monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / f"machine{index}"))
        parts.append(str(tmp_path / f"part{index}.zip"))
        assert main(["bundle", variants, "--shard", f"{index}/3", "-o", parts[-1]]) == 0
    assert nvcc.compiled == 8, "no kernel is built on two machines"
    assert main(["bundle", "--merge", *parts, "-o", str(tmp_path / "all.zip")]) == 0
    whole = bundle.read(tmp_path / "all.zip")
    assert len(whole.entries) == 8
    # `load` on a machine with the bundle alone: all of the matrix, and nothing else.
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FAGEN_BUNDLES", str(tmp_path / "all.zip"))
    monkeypatch.setenv("FAGEN_JIT", "0")
    from fagen import matrix
    from fagen.arch import parse_list

    asked = matrix.kernels(matrix.read(Path(variants), lambda text: parse_list(text or "")))
    assert all(isinstance(artifact, BundledArtifact) for artifact in build.find_or_build(asked))
    assert nvcc.compiled == 8


def test_the_command_says_what_it_made(
    variants: str, nvcc: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels.zip"
    assert main(["bundle", variants, "-o", str(out)]) == 0
    said = capsys.readouterr().out
    checksum = hashlib.sha256(out.read_bytes()).hexdigest()
    assert said.count("\n") == 1 and "8 kernels" in said and checksum in said
    assert main(["bundle", variants, "-o", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sha256"] == checksum and document["size"] == out.stat().st_size
    slugs = [row["slug"] for row in document["kernels"]]
    assert len(slugs) == 8 and "fwd_hdim128_bf16_causal_softcap_sm80" in slugs
    assert nvcc.compiled == 8, "the second time all was in the cache"


def test_build_takes_a_matrix(variants: str, nvcc: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--from", variants, "--shard", "1/2", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["artifacts"]
    assert main(["build", "--from", variants, "--shard", "2/2", "--json"]) == 0
    second = json.loads(capsys.readouterr().out)["artifacts"]
    assert len(first) == len(second) == 4 == nvcc.compiled - 4
    assert main(["build", "--from", variants]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("cached") == 8 and "8 kernels" in captured.err and nvcc.compiled == 8
    assert main(["build", "--from", variants, "--shard", "9/9"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--from", "V", "--causal"], "give one of them"),
        (["build", "--from", "V", "--head-dim", "64"], "give one of them"),
        (["build", "--from", "V", "--dtype", "bf16"], "give one of them"),
        (["build", "--shard", "1/2", "--head-dim", "64"], "add --from"),
        (["build", "--from", "V", "--shard", "3/2"], "not a part such as 3/16"),
        (["build", "--from", "V", "--arch", "sm42"], "unknown architecture"),
        (["build"], "--head-dim"),
        (["bundle", "V"], "-o"),
        (["bundle", "-o", "O.zip"], "FILE"),
        (["bundle", "V", "-o", "O.tar"], "ends in .zip"),
        (["bundle", "V", "V", "-o", "O.zip"], "--merge joins bundles"),
        (["bundle", "--merge", "V", "--shard", "1/2", "-o", "O.zip"], "without --arch, --shard and --jobs"),
        (["bundle", "--merge", "nope.zip", "-o", "O.zip"], "nope.zip: no such file or directory"),
    ],
)
def test_bad_input_is_one_clear_error(
    arguments: list[str], message: str, variants: str, nvcc: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.replace("V", variants, 1) if word == "V" else word for word in arguments]
    words = [str(tmp_path / word) if word.startswith("O.") else word for word in words]
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("fagen: error: ") and message in captured.err
    assert nvcc.compiled == 0 and not list(tmp_path.glob("O.*"))


def test_a_failed_build_writes_no_bundle(
    variants: str, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc.path.write_text(nvcc.path.read_text().replace("cat ", "exit 1\ncat "))
    assert main(["bundle", variants, "-o", str(tmp_path / "kernels.zip")]) == 1
    assert not (tmp_path / "kernels.zip").exists()


def test_a_real_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC's or nvcc's own cubin and PTX pass for what they are."""
    from fagen.plan import plan
    from fagen.spec import AttentionSpec

    monkeypatch.setattr(toolchain, "driver_version", lambda: None)
    monkeypatch.setattr(bundle, "driver_version", lambda: None)
    try:
        toolchain.find_cuda_compiler()
    except ToolchainError:
        pytest.skip("no CUDA compiler")
    wanted = [plan(AttentionSpec(head_dim=16), resolve(arch))[0] for arch in ("sm80", "sm80+ptx")]
    built: list[Artifact] = build.build(wanted)
    bundle.write(tmp_path / "kernels.zip", built)
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FAGEN_BUNDLES", str(tmp_path / "kernels.zip"))
    monkeypatch.setenv("FAGEN_JIT", "0")
    found = build.find_or_build(wanted)
    images = [artifact.image for artifact in found if isinstance(artifact, BundledArtifact)]
    assert images == [artifact.binary.read_bytes() for artifact in built]


@pytest.mark.gpu
def test_a_kernel_of_a_bundle_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card: forward and gradients, bit for bit those of the cache, on a machine that has lost its compiler."""
    import torch

    import fagen

    spec = fagen.AttentionSpec(head_dim=64, causal=True, backward=True, deterministic=True)
    q, k, v = (torch.randn(1, 300, 2, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))

    def run(attention: Any) -> tuple[torch.Tensor, ...]:
        o = attention(q, k, v)
        return o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))

    attention = fagen.load(spec)
    expected = run(attention)
    artifacts = [kernel.artifact for kernel in attention.kernels("cuda:0").values()]
    bundle.write(tmp_path / "kernels.zip", artifacts)

    def none() -> None:
        raise ToolchainError("no CUDA compiler was found")

    monkeypatch.setattr(toolchain, "find_cuda_compiler", none)
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FAGEN_BUNDLES", str(tmp_path / "kernels.zip"))
    monkeypatch.setenv("FAGEN_JIT", "0")
    bundled = fagen.load(spec)
    assert all(isinstance(kernel.artifact, BundledArtifact) for kernel in bundled.kernels("cuda:0").values())
    assert all(torch.equal(mine, other) for mine, other in zip(run(bundled), expected, strict=True))
    with pytest.raises(CacheError, match="is not built"):
        fagen.load(fagen.AttentionSpec(head_dim=128))
