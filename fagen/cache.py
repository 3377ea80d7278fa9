"""Where built kernels are kept: their key, their directory, their locks, and how they are read, listed and removed.

An artifact is one directory, `<slug>-<first 12 digits of the digest>/`:

    kernel.cu | kernel.cpp               what was compiled
    kernel.cubin | kernel.ptx | kernel.so what came out
    spec.json                            the AttentionSpec
    resources.json                       registers, spills, stack, static shared memory; null where no ptxas ran
    build.log                            the command and what the compiler said
    artifact.json                        digest, entry, compiler, flags, seconds, and checksums of all files

It is written elsewhere on the same file system and renamed into place, so a reader sees all of it or nothing. Whoever
builds holds the lock of that name; readers take no lock and trust only what matches its checksums. No clock decides
anything: the times of an artifact, of which the directory's is that of its last use, are for people and for `clean`.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
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
_FORMAT = 2
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
_TEMPLATES = ".templates"
_STAGING_LOCK = ".lock"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # of a rename to a place where something is


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
    flags: tuple[str, ...]
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

    @property
    def built(self) -> float:
        """When it was built, in seconds since the epoch."""
        return (self.directory / MANIFEST).stat().st_mtime


@dataclass(frozen=True)
class BundledArtifact(Artifact):
    """A kernel of a bundle, in memory. Its paths are what they would be if the bundle were a folder; `seconds` is 0."""

    fields: tuple[tuple[str, Any], ...] = ()
    image: bytes = b""

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.fields)

    @property
    def log(self) -> str:
        return f"# {self.compiler}\n# from {self.directory.parent}\n"

    @property
    def size(self) -> int:
        return len(self.image)

    @property
    def built(self) -> float:
        return self.directory.parent.stat().st_mtime


@dataclass(frozen=True)
class Entry:
    """One directory that fagen made. `artifact` is None where no kernel can be read from it; `problem` says why.

    `used` is when it was last used, or else made, in seconds since the epoch; `size` is the bytes of all its files.
    """

    directory: Path
    artifact: Artifact | None
    problem: str
    used: float
    size: int


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
    doubt = _doubt_of_tree(primary) if target == "emulate" else None
    if doubt is not None and env.cache_dir() is not None:
        raise CacheError(doubt)
    if doubt is not None:
        return _fallbacks(primary, target)
    return [primary] if _writable(primary) else [primary, *_fallbacks(primary, target)]


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
            _make(root)
            (root / _LOCKS).mkdir(mode=0o755, exist_ok=True)
        except OSError as error:
            tried.append(f"{root} ({(error.strerror or str(error)).lower()})")
            continue
        if root != primary:
            reason = (_doubt_of_tree(primary) if target == "emulate" else None) or f"{primary} is not writable"
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


def find(slug: str, key: str, target: Target, *, warn: bool = True, use: bool = True) -> Artifact | None:
    """The whole artifact of this key, None where there is none. A damaged one counts as none, with a warning.

    With `use` it is noted as used now. Raises CacheError where it is a CPU library that other users could have written.
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
        if use:
            _note_use(directory)
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
                _note_use(directory)
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
        if manifest.pop("sha256") != _manifest_checksum(manifest):
            raise CorruptArtifact(f"{MANIFEST} does not match its checksum")
        files: dict[str, dict[str, Any]] = manifest["files"]
        source, binary = manifest["source"], manifest["binary"]
        if not set(files) <= _ARTIFACT_FILES:
            raise CorruptArtifact(f"{MANIFEST} names files that are not an artifact's")
        if not {source, binary, "resources.json"} <= set(files):
            raise CorruptArtifact(f"{MANIFEST} lacks a file")
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
            flags=tuple(manifest["flags"]),
            seconds=manifest["seconds"],
            source=directory / source,
            binary=directory / binary,
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
    content = {"format": _FORMAT, **fields, "files": files}
    content["sha256"] = _manifest_checksum(content)
    manifest = directory / MANIFEST
    manifest.write_text(json.dumps(content, indent=2) + "\n")
    manifest.chmod(stat.S_IMODE(manifest.stat().st_mode) & ~0o022)


def publish(staged: Path, root: Path, name: str, *, replace: bool = False) -> Artifact:
    """Moves the sealed directory `staged` to its place. Where a whole one is there already, that one stays and counts.

    `replace` puts the new one in its place all the same.
    """
    final = root / name
    try:
        mine = read(staged, verify=False)
    except CorruptArtifact as error:  # it was whole until somebody began to remove it
        raise FileNotFoundError(errno.ENOENT, f"removed while it is published ({error})", str(staged)) from error
    published = dataclasses.replace(
        mine, directory=final, source=final / mine.source.name, binary=final / mine.binary.name
    )
    for _ in range(100):
        try:
            staged.rename(final)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        else:
            return published
        if not replace:
            with suppress(FileNotFoundError, CorruptArtifact):
                winner = read(final)
                if winner.digest == mine.digest:
                    return winner
        _discard(final, staged.parent)
    raise CacheError(f"{final} is put back each time it is replaced: is another fagen building it with --force?")


@contextmanager
def lock(root: Path, name: str, *, wait: bool = True) -> Iterator[bool]:
    """Holds the lock of artifact `name` under `root`: True when it is; False, with `wait=False`, when another has it.

    Raises CacheError where the file system has no locks, OSError where the lock's file cannot be made.
    """
    descriptor = _acquire(root / _LOCKS / f"{name}.lock", wait)
    if descriptor is None:
        yield False
        return
    try:
        yield True
    finally:
        os.close(descriptor)


@contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A new directory on the file system of `root`, removed at the end, whatever happens."""
    sweep(root)
    base = root / _STAGING
    for _ in range(100):
        # Another process may remove the empty base at any time, also while this one finds that it exists, and may sweep
        # the new directory before it is locked.
        with suppress(FileNotFoundError, FileExistsError):
            base.mkdir(mode=0o755, exist_ok=True)
            directory = Path(tempfile.mkdtemp(prefix="build-", dir=base))
            # Held as long as this process lives, so that what a killed one left can be told from what is in use.
            alive = _acquire(directory / _STAGING_LOCK, wait=True)
            assert alive is not None
            break
    else:
        raise CacheError(f"{base} is removed as soon as it is made")
    try:
        yield directory
    finally:
        os.close(alive)
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):
            base.rmdir()


def sweep(root: Path) -> None:
    """Removes the working directories that killed processes left under `root`."""
    base = root / _STAGING
    if not base.is_dir():
        return
    with suppress(OSError):
        for directory in base.iterdir():
            with suppress(OSError, CacheError):
                dead = _acquire(directory / _STAGING_LOCK, wait=False)
                if dead is not None:
                    shutil.rmtree(directory, ignore_errors=True)
                    os.close(dead)
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


def forget_failed(root: Path, name: str) -> None:
    """Removes what a failed build of this artifact left: it has been built since."""
    shutil.rmtree(root / _FAILED / name, ignore_errors=True)
    with suppress(OSError):
        (root / _FAILED).rmdir()


def list_artifacts() -> list[Artifact]:
    """Every artifact that can be read, by slug; checksums are left to whoever loads one."""
    found = [entry.artifact for entry in entries() if entry.artifact is not None]
    return sorted(found, key=lambda artifact: (artifact.slug, artifact.target, artifact.digest))


def entries() -> list[Entry]:
    """Every directory of the cache, by name: artifacts, what cannot be read as one, and what failed builds left."""
    return [
        entry
        for root in _all_dirs()
        for path in [*_artifact_directories(root), *_artifact_directories(root / _FAILED)]
        if (entry := _entry(path)) is not None
    ]


def clean(accept: Callable[[Entry], bool] | None = None) -> tuple[int, int]:
    """Removes the entries that `accept` takes, without one all. It is asked again once the entry's lock is held.

    Returns how many directories and how many bytes went. Nothing that is not fagen's is touched. Raises CacheError
    where a directory cannot be written to.
    """
    removed = freed = 0
    doomed = [entry.directory for entry in entries() if accept is None or accept(entry)]
    for root in _all_dirs():
        here = [path for path in doomed if path.parent in (root, root / _FAILED)]
        if not here and not os.path.isdir(root / _STAGING):  # False where this user may not look
            continue
        if not os.access(root, os.W_OK):
            raise CacheError(f"{root} is not writable: its kernels stay")
        try:
            (root / _LOCKS).mkdir(mode=0o755, exist_ok=True)
            for path in here:
                with lock(root, path.name):
                    entry = _entry(path)
                    if entry is not None and (accept is None or accept(entry)):
                        with staging(root) as scratch:
                            _discard(path, scratch)
                        removed += 1
                        freed += entry.size
                        (root / _LOCKS / f"{path.name}.lock").unlink(missing_ok=True)
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


def templates_file(name: str) -> Path | None:
    """Where a template is kept as Python code, or will be, in a cache that is there already; None where others could
    have written it, for that code runs in this process."""
    root = cache_dir()
    folder = root / _TEMPLATES
    file = folder / name
    if not root.is_dir() or _doubt_of_tree(root) or _doubt(folder) or _doubt(file):
        return None
    return file


def forget_templates() -> None:
    """Removes what is kept of templates as Python code."""
    for root in _all_dirs():
        shutil.rmtree(root / _TEMPLATES, ignore_errors=True)


def _doubt(path: Path) -> str | None:
    """Why a library under `path` must not be loaded: who else can write there; None where nobody can.

    A directory with the sticky bit lets others add entries but not replace ours, and each artifact is checked as well.
    """
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path}: {error.strerror}: set FAGEN_CACHE_DIR to a directory of your own"
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


def _doubt_of_tree(root: Path) -> str | None:
    """`_doubt` of a cache directory, and of those above it, in which others could put another in its place."""
    own = _doubt(root) or _doubt(root / _STAGING)
    if own is not None:
        return own
    for path in root.parents:
        with suppress(OSError):
            mode = path.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return (
                    f"{path} is writable by everybody, and libraries for the CPU are loaded from {root}: "
                    f"chmod o-w '{path}', or set FAGEN_CACHE_DIR to another directory"
                )
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


def _fallbacks(primary: Path, target: Target) -> list[Path]:
    """Directories of this user's own. The one in the shared temporary directory may have been made by somebody else."""
    candidates = [path for path in (_user_dir(), _temporary_dir()) if path is not None and path != primary]
    doubt = _doubt_of_tree if target == "emulate" else _doubt
    return [path for path in candidates if doubt(path) is None]


def _all_dirs() -> list[Path]:
    primary = cache_dir()
    return [primary] if _writable(primary) else [primary, *_fallbacks(primary, "cuda")]


def _note_use(directory: Path) -> None:
    """Keeps the time of an artifact's last use, where it can: not in a cache that this user may only read."""
    with suppress(OSError):
        os.utime(directory)


def _writable(root: Path) -> bool:
    """Whether this user can build in `root`: make it, or write to it and to what fagen keeps there."""
    for path in (root, *root.parents):
        try:
            if not stat.S_ISDIR(path.stat().st_mode):
                return False
        except FileNotFoundError:
            continue
        except OSError:
            return False
        inner = [root / name for name in (_LOCKS, _STAGING)] if path == root else []
        return all(_may_write(each) for each in [path, *inner])
    return False


def _may_write(directory: Path) -> bool:
    """Whether this user can write to `directory`, or it is not there. Asked again, for the system says the same of what
    may not be written to as of what another process has just removed, and may have made anew."""
    return any(os.access(directory, os.W_OK | os.X_OK) or not os.path.lexists(directory) for _ in range(10))


def _make(root: Path) -> None:
    """Makes `root` and what lacks above it, writable by this user alone whatever the umask."""
    for path in reversed([path for path in (root, *root.parents) if not path.exists()]):
        path.mkdir(mode=0o755, exist_ok=True)


def _acquire(path: Path, wait: bool) -> int | None:
    """A descriptor that holds the system's lock on `path`, made if need be; None where it is held and `wait` is False.

    It is let go when the descriptor is closed, and by the system when the process ends in whatever way. A file that was
    removed while this process waited for it locks nothing, so then the one that is there now is taken.

    Raises CacheError where the file system has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = os.fstat(descriptor)
            with suppress(FileNotFoundError):
                if os.path.samestat(held, path.stat()):
                    return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError as error:
            os.close(descriptor)
            raise CacheError(
                f"{path.parent} cannot be locked ({error.strerror}): "
                "set FAGEN_CACHE_DIR to a directory on a local file system"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _verify(path: Path, expected: dict[str, Any], checksum: bool) -> None:
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CorruptArtifact(f"{path.name} has {size} bytes, not {expected['bytes']}")
    if checksum and _sha256(path) != expected["sha256"]:
        raise CorruptArtifact(f"{path.name} does not match its checksum")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _manifest_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _artifact_directories(root: Path) -> list[Path]:
    """Directories under `root` that fagen made: of an artifact's name, with an artifact's files and no others."""
    found: list[Path] = []
    with suppress(OSError):
        for path in sorted(root.iterdir()):
            with suppress(OSError):  # gone meanwhile
                named = _ARTIFACT_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
                if named and {file.name for file in path.iterdir()} <= _ARTIFACT_FILES:
                    found.append(path)
    return found


def _entry(directory: Path) -> Entry | None:
    """What `directory` holds; None where it is gone."""
    artifact, problem = None, ""
    try:
        if directory.parent.name == _FAILED:
            problem = "its build failed"
        else:
            artifact = read(directory, verify=False)
    except FileNotFoundError:
        return None
    except CorruptArtifact as error:
        problem = str(error)
    try:
        size = sum(file.stat().st_size for file in directory.iterdir())
        return Entry(directory, artifact, problem, directory.stat().st_mtime, size)
    except FileNotFoundError:
        return None


def _discard(directory: Path, scratch: Path) -> None:
    """Takes `directory` away in one step, then deletes it."""
    aside = Path(tempfile.mkdtemp(prefix="old-", dir=scratch)) / "artifact"
    with suppress(FileNotFoundError):
        directory.rename(aside)
    shutil.rmtree(aside.parent, ignore_errors=True)


def _glob_escape(text: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", text)
