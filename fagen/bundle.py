"""Bundles: built kernels in one file, for machines without a compiler.

A bundle is a zip file of

    fagen-bundle.json                       format, fagen's version, and of each kernel: slug, spec, architecture,
                                            digest, entry, compiler, flags, resources, and size and sha256 of its two
                                            files
    <slug>-<first 12 of the digest>/kernel.cu
    <slug>-<first 12 of the digest>/kernel.cubin | kernel.ptx

Nothing is ever unpacked: a kernel's bytes go from the file, once they match their checksum, to the driver. The names of
the members follow from the manifest, so none can lead elsewhere. Only cubins and PTX are taken, which no CPU executes.
The same kernels give the same file, byte for byte, whoever built them and when.

`load` looks in the files that FAGEN_BUNDLES names, and in `kernels.zip` of each package that an entry point of the
group `fagen.bundles` names; no such package is imported. A kernel serves where it was made of the very source that this
version of fagen renders for the same architecture, by whatever compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import struct
import tempfile
import warnings
import zipfile
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fagen import __version__, cache, env
from fagen.cache import Artifact, BundledArtifact, Resources
from fagen.driver import driver_version
from fagen.errors import CacheError, SpecError
from fagen.files import replacing

MANIFEST = "fagen-bundle.json"
ENTRY_POINTS = "fagen.bundles"
IN_PACKAGE = "kernels.zip"

_FORMAT = 1
_MOST_BYTES = 64 * 2**20  # of a file of a kernel; the largest cubin has a few hundred KiB
_MOST_MANIFEST_BYTES = 256 * 2**20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the oldest time of a zip file: no bundle says when it was made
_EM_CUDA = 190  # ELF machine of a cubin
_WHEEL = re.compile(r"(?P<name>[A-Za-z][A-Za-z0-9_.]*)-(?P<version>\d[A-Za-z0-9_.!+]*)-py3-none-any\.whl")
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError)

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Member(_Strict):
    """One file of a kernel. Its name is one of three, so no path can stand there."""

    name: Literal["kernel.cu", "kernel.cubin", "kernel.ptx"]
    bytes: Annotated[int, Field(gt=0, le=_MOST_BYTES)]
    sha256: Sha256


class Entry(_Strict):
    """One kernel of a bundle, as the manifest has it."""

    slug: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$")]
    spec: dict[str, Any]
    arch: str
    digest: Sha256
    entry: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    compiler: str
    flags: tuple[str, ...]
    resources: dict[str, int] | None
    source: Member
    binary: Member

    @property
    def folder(self) -> str:
        """Folder of the kernel's files in the bundle."""
        return cache.directory_name(self.slug, self.digest)

    def path(self, member: Member) -> str:
        return f"{self.folder}/{member.name}"


class _Manifest(_Strict):
    format: int
    fagen: str
    kernels: tuple[Entry, ...]


@dataclass(frozen=True)
class Bundle:
    """A bundle whose manifest is sound; the files of its kernels are checked as they are read."""

    path: Path
    fagen: str
    entries: tuple[Entry, ...]

    def read(self, entry: Entry, member: Member) -> bytes:
        """A file of a kernel. Raises CacheError where it is not the one that the manifest describes."""
        what = f"{self.path}: {entry.path(member)}"
        advice = "the bundle is damaged or was changed; make or copy it again"
        try:
            with zipfile.ZipFile(self.path) as archive:
                size = archive.getinfo(entry.path(member)).file_size
                if size != member.bytes:
                    raise CacheError(f"{what} has {size} bytes, not {member.bytes}: {advice}")
                data = _extract(archive, entry.path(member))
        except OSError as error:
            raise CacheError(f"{self.path}: {(error.strerror or str(error)).lower()}") from error
        except (KeyError, *_DAMAGE) as error:
            raise CacheError(f"{what} cannot be read ({error}): {advice}") from error
        if hashlib.sha256(data).hexdigest() != member.sha256:
            raise CacheError(f"{what} does not match its checksum: {advice}")
        if member == entry.binary:
            problem = _problem(data, entry)
            if problem is not None:
                raise CacheError(f"{what} {problem}: such a bundle is not used")
        return data


def find(slug: str, source: str, arch: str) -> BundledArtifact | None:
    """The kernel that a bundle has of exactly this source for `arch`, where the driver here can load it.

    Raises CacheError for a bundle that is damaged, SpecError where FAGEN_BUNDLES names none.
    """
    checksum = hashlib.sha256(source.encode()).hexdigest()
    for bundle in search():
        for entry in bundle.entries:
            same = entry.slug == slug and entry.arch == arch and entry.source.sha256 == checksum
            if same and _loads_here(entry):
                return _artifact(bundle, entry)
    return None


def search() -> list[Bundle]:
    """The bundles that FAGEN_BUNDLES names, then those of installed packages. Errors as for `find`."""
    paths: list[Path] = []
    for path in env.bundles():
        if path.is_dir():
            paths += sorted(path.glob("*.zip"))
        elif path.is_file():
            paths.append(path)
        else:
            raise SpecError(f"FAGEN_BUNDLES: {path} is neither a bundle nor a directory of bundles")
    return [read(path) for path in dict.fromkeys([*paths, *_installed()])]


def read(path: Path) -> Bundle:
    """The bundle at `path`. Raises CacheError for a file that is none, or whose manifest and members disagree."""
    try:
        state = path.stat()
    except OSError as error:
        raise CacheError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    return _read(path, state.st_mtime_ns, state.st_size, state.st_ino)


def write(path: Path, artifacts: Iterable[Artifact]) -> Bundle:
    """Makes the bundle `path` of built kernels: a zip file, or a wheel where the name ends in `.whl`.

    The file is there whole or not at all. Raises CacheError for an artifact that is damaged or runs on the CPU, and
    where the file cannot be written.
    """
    parts: list[_Part] = []
    for artifact in artifacts:
        if artifact.target != "cuda":
            raise CacheError(f"{artifact.slug} is a library for the CPU: a bundle holds kernels for GPUs only")
        try:
            parts.append(_part(cache.read(artifact.directory)))
        except (FileNotFoundError, cache.CorruptArtifact) as error:
            raise CacheError(f"{artifact.directory} is damaged ({error}): build it again") from error
    return _write(path, parts)


def merge(path: Path, bundles: Sequence[Bundle]) -> Bundle:
    """Makes one bundle of several; what more than one has is there once.

    Raises CacheError for a file that does not match its manifest, and for two binaries of one kernel and digest.
    """
    return _write(path, [_Part(entry, bundle.path, bundle) for bundle in bundles for entry in bundle.entries])


def check_output(path: Path) -> None:
    """Raises SpecError for a name that no bundle can have, before anything is built for it."""
    if path.suffix == ".whl":
        _wheel_name(path)
    elif path.suffix != ".zip":
        raise SpecError(f"{path}: a bundle ends in .zip, or .whl for a wheel")
    if not path.parent.is_dir():
        raise SpecError(f"{path}: there is no directory {path.parent}")


@dataclass(frozen=True)
class _Part:
    """A kernel on its way into a bundle, from a directory or from another bundle."""

    entry: Entry
    origin: Path
    bundle: Bundle | None = None

    def read(self, member: Member) -> bytes:
        return (self.origin / member.name).read_bytes() if self.bundle is None else self.bundle.read(self.entry, member)


def _part(artifact: Artifact) -> _Part:
    files = {path.name: path.read_bytes() for path in (artifact.source, artifact.binary)}
    source, binary = ({"name": n, "bytes": len(b), "sha256": hashlib.sha256(b).hexdigest()} for n, b in files.items())
    entry = Entry(
        slug=artifact.slug,
        spec=artifact.spec,
        arch=artifact.arch,
        digest=artifact.digest,
        entry=artifact.entry,
        compiler=artifact.compiler,
        flags=artifact.flags,
        resources=None if artifact.resources is None else asdict(artifact.resources),
        source=Member.model_validate(source),
        binary=Member.model_validate(binary),
    )
    return _Part(entry, artifact.directory)


def _write(path: Path, parts: Sequence[_Part]) -> Bundle:
    check_output(path)
    chosen: dict[str, _Part] = {}
    for part in parts:
        other = chosen.setdefault(part.entry.folder, part)
        if (other.entry.digest, other.entry.binary) != (part.entry.digest, part.entry.binary):
            raise CacheError(
                f"{part.entry.slug}: {other.origin} and {part.origin} have two binaries of one digest; "
                "build it again on one machine"
            )
    try:
        with replacing(path) as file:
            if path.suffix == ".whl":
                _write_wheel(file, path, [chosen[name] for name in sorted(chosen)])
            else:
                _write_zip(file, [chosen[name] for name in sorted(chosen)])
    except OSError as error:
        raise CacheError(f"{path} was not written: {(error.strerror or str(error)).lower()}") from error
    return Bundle(path, __version__, tuple(chosen[name].entry for name in sorted(chosen)))


def _write_zip(file: IO[bytes], parts: Sequence[_Part]) -> None:
    manifest = {"format": _FORMAT, "fagen": __version__}
    kernels = [part.entry.model_dump(mode="json") for part in parts]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, MANIFEST, (json.dumps({**manifest, "kernels": kernels}, indent=1) + "\n").encode())
        for part in parts:
            for member in (part.entry.source, part.entry.binary):
                _add(archive, part.entry.path(member), part.read(member))


def _write_wheel(file: IO[bytes], path: Path, parts: Sequence[_Part]) -> None:
    """A wheel with the bundle as its one file, and the entry point that leads `load` to it."""
    name, version = _wheel_name(path)
    package = re.sub(r"[-_.]+", "_", name).lower()
    info = f"{name}-{version}.dist-info"
    about = "Wheel-Version: 1.0\nGenerator: fagen\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    # Another version of fagen may render other sources, for which these kernels do not serve.
    what = f"Summary: {len(parts)} attention kernels, built by fagen\nRequires-Dist: fagen=={__version__}\n"
    with tempfile.TemporaryFile(dir=path.parent) as inner:
        _write_zip(inner, parts)
        inner.seek(0)
        files = {
            f"{package}/{IN_PACKAGE}": inner.read(),
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{what}".encode(),
            f"{info}/WHEEL": about.encode(),
            f"{info}/entry_points.txt": f"[{ENTRY_POINTS}]\n{package} = {package}\n".encode(),
        }
    record = "".join(f"{name},sha256={_record_hash(data)},{len(data)}\n" for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            _add(archive, name, data)


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = archive.compression
    info.create_system = 3  # Unix, wherever it is made
    info.external_attr = 0o100644 << 16
    archive.writestr(info, data)


def _record_hash(data: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _wheel_name(path: Path) -> tuple[str, str]:
    match = _WHEEL.fullmatch(path.name)
    if match is None:
        raise SpecError(f"{path}: a wheel's name says what it is: acme_kernels-1.0-py3-none-any.whl")
    return match["name"], match["version"]


@lru_cache(maxsize=64)
def _read(path: Path, _mtime: int, _size: int, _inode: int) -> Bundle:
    advice = "make it with `fagen bundle`, or copy it again"
    try:
        with zipfile.ZipFile(path) as archive:
            names = [info.filename for info in archive.infolist()]
            if MANIFEST not in names:
                raise CacheError(f"{path} is not a bundle, it has no {MANIFEST}: {advice}")
            if archive.getinfo(MANIFEST).file_size > _MOST_MANIFEST_BYTES:
                raise CacheError(f"{path} is not a bundle, its {MANIFEST} is too large: {advice}")
            data = _extract(archive, MANIFEST)
    except OSError as error:
        raise CacheError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except _DAMAGE as error:
        raise CacheError(f"{path} is not a whole zip file ({error}): {advice}") from error
    manifest = _manifest(path, data, advice)
    listed = {MANIFEST} | {entry.path(member) for entry in manifest.kernels for member in (entry.source, entry.binary)}
    if len(set(names)) < len(names) or len(listed) != 1 + 2 * len(manifest.kernels):
        raise CacheError(f"{path} is not a bundle, it has a file or a kernel twice: {advice}")
    if set(names) != listed:
        strange = sorted(set(names) - listed)
        what = f"{strange[0]!r} is not in its manifest" if strange else f"{min(listed - set(names))} is missing"
        raise CacheError(f"{path} is not a bundle, {what}: {advice}")
    return Bundle(path, manifest.fagen, manifest.kernels)


def _extract(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise zipfile.BadZipFile(f"{name} is compressed in a way that no bundle is")
    return archive.read(info)


def _manifest(path: Path, data: bytes, advice: str) -> _Manifest:
    try:
        document = json.loads(data)
        if isinstance(document, dict) and document.get("format", _FORMAT) != _FORMAT:
            raise CacheError(f"{path} has format {document['format']!r}, this fagen reads {_FORMAT}: {advice}")
        manifest = _Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise CacheError(f"{path}: {MANIFEST} is malformed, {place}: {first['msg'].lower()}; {advice}") from None
    except (ValueError, RecursionError) as error:
        raise CacheError(f"{path}: {MANIFEST} is malformed, {error}; {advice}") from error
    for entry in manifest.kernels:
        if entry.source.name != "kernel.cu" or entry.binary.name == "kernel.cu":
            raise CacheError(f"{path}: {entry.slug} has {entry.source.name} as source, {entry.binary.name} as binary")
    return manifest


def _artifact(bundle: Bundle, entry: Entry) -> BundledArtifact:
    directory = bundle.path / entry.folder
    try:
        resources = None if entry.resources is None else Resources(**entry.resources)
    except TypeError as error:
        raise CacheError(f"{bundle.path}: the resources of {entry.slug} are malformed: {error}") from error
    return BundledArtifact(
        directory=directory,
        slug=entry.slug,
        digest=entry.digest,
        entry=entry.entry,
        arch=entry.arch,
        target="cuda",
        compiler=entry.compiler,
        flags=entry.flags,
        seconds=0.0,
        source=directory / entry.source.name,
        binary=directory / entry.binary.name,
        resources=resources,
        fields=tuple(entry.spec.items()),
        image=bundle.read(entry, entry.binary),
    )


def _problem(data: bytes, entry: Entry) -> str | None:
    """Why this is not a kernel that a GPU runs; None where it is."""
    if entry.binary.name == "kernel.ptx":
        head = re.search(rf"\.entry\s+{entry.entry}\b".encode(), data)
        return None if head else f"is not PTX with an entry {entry.entry}"
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        return "is not a cubin"
    (machine,) = struct.unpack_from("<H", data, 18)
    return None if machine == _EM_CUDA else f"is not a cubin but code for a CPU (ELF machine {machine})"


def _loads_here(entry: Entry) -> bool:
    """Whether the driver, where there is one, is of the compiler's CUDA version: of its major one for a cubin."""
    driver = driver_version()
    version = re.match(r"(?:nvrtc|nvcc) (\d+)\.(\d+)", entry.compiler)
    if driver is None or version is None:
        return True
    compiled = int(version[1]), int(version[2])
    return compiled <= driver if entry.binary.name == "kernel.ptx" else compiled[0] <= driver[0]


@lru_cache(maxsize=1)
def _installed() -> tuple[Path, ...]:
    """The bundles of installed packages, found without importing them."""
    found: dict[Path, None] = {}
    for point in sorted(metadata.entry_points(group=ENTRY_POINTS)):
        try:
            package = importlib.util.find_spec(point.value) if point.value.isidentifier() else None
        except (ImportError, ValueError):
            package = None
        folders = list(package.submodule_search_locations or ()) if package is not None else []
        paths = [path for folder in folders if (path := Path(folder) / IN_PACKAGE).is_file()]
        if not paths:
            warnings.warn(
                f"the entry point {point.name} of {ENTRY_POINTS} names {point.value}, which is no package with a "
                f"{IN_PACKAGE}: its kernels are not used; install it again, or remove it",
                RuntimeWarning,
                stacklevel=2,
            )
        found |= dict.fromkeys(paths)
    return tuple(found)
