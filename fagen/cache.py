"""Where built kernels are kept: their key, their directory, their locks, and how they are read, listed and removed.

An artifact is one directory, `<slug>-<first 12 digits of the digest>/`:

    kernel.cu | kernel.cpp               what was compiled
    kernel.cubin | kernel.ptx | kernel.so what came out
    spec.json                            the AttentionSpec
    resources.json                       registers, spills, stack, static shared memory; null where no ptxas ran
    build.log                            the command and what the compiler said
    artifact.json                        digest, entry, compiler, seconds, and the checksums of the other files

It is written elsewhere on the same file system and renamed into place, so a reader sees all of it or nothing. Whoever
builds holds the lock of that name; readers take no lock and trust only what matches its checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fagen import env
from fagen.errors import CacheError

Target = Literal["cuda", "emulate"]

MANIFEST = "artifact.json"
_FORMAT = 1
_DIGEST_DIGITS = 12
_NAME_BYTES = 255 - len(".lock")  # the longest name of a file system, less what a lock's file adds
_ARTIFACT_NAME = re.compile(rf".+-[0-9a-f]{{{_DIGEST_DIGITS}}}")
_ARTIFACT_FILES = frozenset(
    {MANIFEST, "kernel.cu", "kernel.cpp", "kernel.cubin", "kernel.ptx", "kernel.so"}
    | {"spec.json", "resources.json", "build.log"}
)
_LOCKS = ".locks"
_STAGING = ".tmp"
_FAILED = "failed"
_STAGING_LOCK = ".lock"
_STALE_SECONDS = 60.0


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of a kernel: registers a thread, and bytes a thread or a block."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem: int


@dataclass(frozen=True)
class Artifact:
    """One built kernel. `cached` is False where the call that returned it compiled it; `seconds` is what that took."""

    directory: Path
    slug: str
    digest: str
    entry: str
    arch: str
    target: Target
    compiler: str
    seconds: float
    source: Path
    binary: Path
    resources: Resources | None
    cached: bool = True

    @property
    def spec(self) -> dict[str, Any]:
        """The fields of the AttentionSpec."""
        fields: dict[str, Any] = json.loads((self.directory / "spec.json").read_text())
        return fields

    @property
    def log(self) -> str:
        """The compiler's command and output."""
        return (self.directory / "build.log").read_text(errors="replace")

    @property
    def size(self) -> int:
        """Bytes of the binary."""
        return self.binary.stat().st_size


class CorruptArtifact(Exception):
    """A directory that should be an artifact and is not whole; the text says why."""


def digest(source: str, flags: Sequence[str], arch: str, identity: str) -> str:
    """The key of a build, sha256 in hex: all that decides what the binary is, and nothing else."""
    parts = json.dumps([_FORMAT, source, list(flags), arch, identity], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(parts.encode()).hexdigest()


def directory_name(slug: str, key: str) -> str:
    """Name of the artifact's directory: safe in file systems, ninja files and shells, at most 255 bytes and `.lock`."""
    safe = re.sub(r"[^A-Za-z0-9_.+-]", "_", slug).lstrip(".-") or "kernel"
    return f"{safe[: _NAME_BYTES - 1 - _DIGEST_DIGITS]}-{key[:_DIGEST_DIGITS]}"


def cache_dir() -> Path:
    """Where artifacts are kept: FAGEN_CACHE_DIR, else `generated/` of the checkout, else the user's cache directory.

    The directory need not exist. Where the user has no home, it is a directory of the user's own in the temporary one.
    """
    asked = env.cache_dir()
    if asked is not None:
        return asked
    checkout = _checkout()
    if checkout is not None:
        return checkout / "generated"
    return _user_dir() or _temporary_dir()


def search_dirs(target: Target) -> list[Path]:
    """Directories to look in for a built kernel: `cache_dir()`, and where this user cannot write there, the fallbacks.

    Raises CacheError where FAGEN_CACHE_DIR is a directory that kernels for the CPU must not be loaded from.
    """
    primary = cache_dir()
    doubt = _doubt(primary) if target == "emulate" else None
    if doubt is not None and env.cache_dir() is not None:
        raise CacheError(doubt)
    if doubt is not None:
        return _fallbacks(primary)
    return [primary] if _writable(primary) else [primary, *_fallbacks(primary)]


def build_dir(target: Target) -> Path:
    """The directory to build in, made if need be: the first of `search_dirs` that this user can write to.

    Warns where it is not `cache_dir()`. Raises CacheError where there is none.
    """
    primary = cache_dir()
    tried: list[str] = []
    for root in search_dirs(target):
        try:
            if not _writable(root):
                raise PermissionError("not writable")
            root.mkdir(mode=0o755, parents=True, exist_ok=True)
            (root / _LOCKS).mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            tried.append(f"{root} ({(error.strerror or str(error)).lower()})")
            continue
        if root != primary:
            reason = (_doubt(primary) if target == "emulate" else None) or f"{primary} is not writable"
            warnings.warn(
                f"{reason}; kernels are built in {root} instead. "
                "Set FAGEN_CACHE_DIR to a directory of your own to choose another",
                RuntimeWarning,
                stacklevel=2,
            )
        return root
    raise CacheError(
        f"no directory to keep kernels in: {', '.join(tried) or primary}. "
        "Set FAGEN_CACHE_DIR to a directory of your own"
    )


def find(slug: str, key: str, target: Target, *, warn: bool = True) -> Artifact | None:
    """The whole artifact of this key, None where there is none. A damaged one counts as none, with a warning.

    Raises CacheError where it is a CPU library that other users could have written.
    """
    name = directory_name(slug, key)
    for root in search_dirs(target):
        directory = root / name
        try:
            artifact = read(directory)
        except FileNotFoundError:
            continue
        except CorruptArtifact as error:
            if warn:
                warnings.warn(f"{directory} is damaged ({error}) and is built again", RuntimeWarning, stacklevel=2)
            continue
        if artifact.digest != key:
            continue
        check_trust(artifact)
        return artifact
    return None


def find_by_source(slug: str, source: str, arch: str) -> Artifact | None:
    """A whole cubin that any compiler made of exactly this source for `arch`: what a machine without one can use."""
    checksum = hashlib.sha256(source.encode()).hexdigest()
    prefix = directory_name(slug, "").removesuffix("-")
    for root in search_dirs("cuda"):
        for directory in sorted(root.glob(f"{_glob_escape(prefix)}-*")):
            try:
                artifact = read(directory)
            except (FileNotFoundError, CorruptArtifact):
                continue
            same = artifact.target == "cuda" and artifact.arch == arch
            if same and _sha256(artifact.source) == checksum:
                return artifact
    return None


def read(directory: Path, *, verify: bool = True) -> Artifact:
    """The artifact in `directory`; with `verify`, every file is compared with its checksum.

    Raises FileNotFoundError where there is no such directory, CorruptArtifact where it is not a whole artifact.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        if manifest["format"] != _FORMAT:
            raise CorruptArtifact(f"format {manifest['format']}, not {_FORMAT}")
        files: dict[str, dict[str, Any]] = manifest["files"]
        for name, expected in files.items():
            _verify(directory / name, expected, verify)
        resources = json.loads((directory / "resources.json").read_bytes())
        return Artifact(
            directory=directory,
            slug=manifest["slug"],
            digest=manifest["digest"],
            entry=manifest["entry"],
            arch=manifest["arch"],
            target=manifest["target"],
            compiler=manifest["compiler"],
            seconds=manifest["seconds"],
            source=directory / manifest["source"],
            binary=directory / manifest["binary"],
            resources=None if resources is None else Resources(**resources),
        )
    except FileNotFoundError as error:
        if not directory.is_dir():
            raise
        raise CorruptArtifact(f"{Path(str(error.filename)).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptArtifact(f"unreadable: {type(error).__name__}: {error}") from error


def seal(directory: Path, fields: dict[str, Any]) -> None:
    """Writes the manifest of the finished files in `directory`: `fields` and their checksums. Nobody else may write."""
    files = {}
    for path in sorted(directory.iterdir()):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o022)
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps({"format": _FORMAT, **fields, "files": files}, indent=2) + "\n")
    manifest.chmod(stat.S_IMODE(manifest.stat().st_mode) & ~0o022)


def publish(staged: Path, root: Path, name: str, *, replace: bool = False) -> Artifact:
    """Moves the sealed directory `staged` to its place. Where a whole one is there already, that one stays and counts.

    `replace` puts the new one in its place all the same.
    """
    final = root / name
    for _ in range(100):
        try:
            staged.rename(final)
        except OSError:
            if not final.exists():
                raise  # nobody was first: the error is a true one
        else:
            return read(final, verify=False)
        if not replace:
            with suppress(FileNotFoundError, CorruptArtifact):
                return read(final)
        _discard(final, staged.parent)
    raise CacheError(f"{final} is put back each time it is replaced: is another fagen building it with --force?")


@contextmanager
def lock(root: Path, name: str, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of artifact `name` under `root`: True when it is; False, with `wait=False`, when another has it.

    Raises CacheError where the file system has no locks.
    """
    from filelock import FileLock, Timeout  # 40 ms, and a warm look-up takes no lock

    handle = FileLock(root / _LOCKS / f"{name}.lock", mode=0o644)
    try:
        handle.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError) as error:
        raise CacheError(
            f"{root} cannot be locked ({error}): set FAGEN_CACHE_DIR to a directory on a local file system"
        ) from error
    try:
        yield True
    finally:
        handle.release()


@contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A new directory on the file system of `root`, removed at the end, whatever happens."""
    from filelock import FileLock

    sweep(root)
    base = root / _STAGING
    for _ in range(100):
        base.mkdir(mode=0o755, exist_ok=True)
        with suppress(FileNotFoundError):  # another process has just removed the empty base
            directory = Path(tempfile.mkdtemp(prefix="build-", dir=base))
            break
    else:
        raise CacheError(f"{base} is removed as soon as it is made")
    # Held as long as this process lives, so that what a killed one left behind can be told from what is in use.
    alive = FileLock(directory / _STAGING_LOCK)
    try:
        alive.acquire()
        yield directory
    finally:
        alive.release()
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):
            base.rmdir()


def sweep(root: Path) -> None:
    """Removes the working directories that killed processes left under `root`."""
    from filelock import FileLock, Timeout

    base = root / _STAGING
    if not base.is_dir():
        return
    for directory in base.iterdir():
        with suppress(OSError, Timeout):
            if time.time() - directory.stat().st_mtime < _STALE_SECONDS:
                continue
            with FileLock(directory / _STAGING_LOCK, timeout=0):
                shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        base.rmdir()


def keep_failed(root: Path, name: str, staged: Path) -> Path | None:
    """Moves what was rendered for a failed build to `failed/` under `root`, with its log; None where that fails too."""
    kept = root / _FAILED / name
    try:
        kept.parent.mkdir(mode=0o755, exist_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.move(staged, kept)
    except OSError:
        return None
    return kept


def list_artifacts() -> list[Artifact]:
    """Every artifact that can be read, by slug; checksums are left to whoever loads one."""
    found: list[Artifact] = []
    for root in _all_dirs():
        for directory in _artifact_directories(root):
            with suppress(FileNotFoundError, CorruptArtifact):
                found.append(read(directory, verify=False))
    return sorted(found, key=lambda artifact: (artifact.slug, artifact.target, artifact.digest))


def clean(predicate: Callable[[Artifact], bool] | None = None) -> tuple[int, int]:
    """Removes the artifacts that `predicate` accepts; without one all, damaged ones and failed builds too.

    Returns how many directories and how many bytes went. Nothing that is not fagen's is touched. Raises CacheError
    where a directory cannot be written to.
    """
    removed = freed = 0
    for root in _all_dirs():
        doomed = [path for path in _artifact_directories(root) if _accepted(path, predicate)]
        if predicate is None:
            doomed += _artifact_directories(root / _FAILED)
        if not doomed and not (root / _STAGING).is_dir():
            continue
        if not os.access(root, os.W_OK):
            raise CacheError(f"{root} is not writable: its kernels stay")
        try:
            (root / _LOCKS).mkdir(mode=0o755, exist_ok=True)
            for path in doomed:
                with lock(root, path.name):
                    bytes_here = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                    with staging(root) as scratch:
                        _discard(path, scratch)
                    (root / _LOCKS / f"{path.name}.lock").unlink(missing_ok=True)
                removed += 1
                freed += bytes_here
        except OSError as error:
            raise CacheError(f"{root}: {error}") from error
        sweep(root)
        with suppress(OSError):
            (root / _FAILED).rmdir()
    return removed, freed


def check_trust(artifact: Artifact) -> None:
    """Raises CacheError where `artifact` runs in this process and somebody else could have written it."""
    if artifact.target != "emulate":
        return
    for path in (artifact.directory, artifact.binary):
        doubt = _doubt(path)
        if doubt is not None:
            raise CacheError(doubt)


def _doubt(path: Path) -> str | None:
    """Why a library under `path` must not be loaded: who else can write there; None where nobody can.

    A directory with the sticky bit lets others add entries but not replace ours, and each artifact is checked as well.
    """
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror}"
    me = os.geteuid()
    if state.st_uid not in (me, 0):
        return (
            f"{path} belongs to user {state.st_uid}, and libraries for the CPU are loaded from it: "
            "set FAGEN_CACHE_DIR to a directory of your own"
        )
    sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
    others = state.st_mode & stat.S_IWOTH
    group = state.st_mode & stat.S_IWGRP and not _is_private_group(state.st_gid, state.st_uid)
    if (others or group) and not sticky:
        who = "everybody" if others else f"group {state.st_gid}"
        return f"{path} is writable by {who}, and libraries for the CPU are loaded from it: chmod go-w '{path}'"
    return None


def _is_private_group(gid: int, uid: int) -> bool:
    """Whether `gid` is the group that a system made for this one user, as Debian and Fedora do with umask 002."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(uid)
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _checkout() -> Path | None:
    """The source tree that this package runs from, None where it is installed."""
    tree = Path(__file__).resolve().parent.parent
    return tree if (tree / "pyproject.toml").is_file() and (tree / "templates").is_dir() else None


def _user_dir() -> Path | None:
    """The user's cache directory; None for a user without a home."""
    import platformdirs

    try:
        path = platformdirs.user_cache_path("fagen")
    except RuntimeError:
        return None
    return path if path.is_absolute() else None  # older releases answer with a literal ~


def _temporary_dir() -> Path:
    return Path(tempfile.gettempdir()) / f"fagen-{os.geteuid()}"


def _fallbacks(primary: Path) -> list[Path]:
    """Directories of this user's own. The one in the shared temporary directory may have been made by somebody else."""
    candidates = [path for path in (_user_dir(), _temporary_dir()) if path is not None and path != primary]
    return [path for path in candidates if _doubt(path) is None]


def _all_dirs() -> list[Path]:
    primary = cache_dir()
    return [primary] if _writable(primary) else [primary, *_fallbacks(primary)]


def _writable(directory: Path) -> bool:
    """Whether files can be made in `directory`, or it can be made."""
    for path in (directory, *directory.parents):
        try:
            if path.exists():
                return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
        except OSError:
            return False
    return False


def _verify(path: Path, expected: dict[str, Any], checksum: bool) -> None:
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CorruptArtifact(f"{path.name} has {size} bytes, not {expected['bytes']}")
    if checksum and _sha256(path) != expected["sha256"]:
        raise CorruptArtifact(f"{path.name} does not match its checksum")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _artifact_directories(root: Path) -> list[Path]:
    """Directories under `root` that fagen made: of an artifact's name, with an artifact's files and no others."""
    try:
        entries = sorted(root.iterdir())
    except OSError:
        return []
    named = (
        path for path in entries if _ARTIFACT_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )
    return [path for path in named if {file.name for file in path.iterdir()} <= _ARTIFACT_FILES]


def _accepted(directory: Path, predicate: Callable[[Artifact], bool] | None) -> bool:
    if predicate is None:
        return True
    try:
        return predicate(read(directory, verify=False))
    except (FileNotFoundError, CorruptArtifact):
        return False


def _discard(directory: Path, scratch: Path) -> None:
    """Takes `directory` away in one step, then deletes it."""
    aside = Path(tempfile.mkdtemp(prefix="old-", dir=scratch)) / "artifact"
    with suppress(FileNotFoundError):
        directory.rename(aside)
    shutil.rmtree(aside.parent, ignore_errors=True)


def _glob_escape(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)
