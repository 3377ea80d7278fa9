"""Builds while things go wrong, and counts what must not happen: `python -m tests.soak --rounds 500 --seed 1`.

A round makes an empty cache and a stub compiler, lets one fault and up to 16 builders loose on them, and then looks at
the cache as the next user finds it. The faults are those of FAULTS. What is counted is to be 0:

    wrong        an artifact that is not what its source compiles to, or is another's
    hang         a builder that does not end
    unreadable   after the round, a kernel that cannot be built or found, a damaged directory, work that nobody removes
    duplicate    a kernel compiled again though the first time was enough, where locks work and nothing was removed
    unclear      an error that is not one of fagen's

A builder is a fork of this process, so that a round takes a fraction of a second. A killed one is killed by SIGKILL: at
a random line of fagen/build.py or fagen/cache.py, or after a random time, while its compilers run on.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from fake_toolchain import FakeSpec, Stub, make_kernel, render  # noqa: E402

import fagen.render  # noqa: E402
from fagen import build, cache, launched, toolchain  # noqa: E402
from fagen.errors import CacheError, FagenError  # noqa: E402

COUNTS = ("wrong", "hang", "unreadable", "duplicate", "unclear")
OTHER_USER = 54321
_HANG_SECONDS = 60.0
_MOST_BUILDERS = 16
_TRACED = (build.__file__, cache.__file__)
_RIGHT, _WRONG, _REFUSED, _UNCLEAR = 0, 1, 3, 4  # exit codes of a builder


@dataclass
class Round:
    """One round: its chances, its place, its compiler and its kernels, and what was counted."""

    chance: random.Random
    home: Path
    emulate: bool
    stub: Stub
    kernels: list[Any]
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    builders: list[Builder] = field(default_factory=list)
    judged: bool = True  # whether compilations are counted
    may_refuse: bool = False  # whether a builder may end with an error of fagen's
    wasted: Counter[str] = field(default_factory=Counter)  # compilations that may be in vain, by slug

    @property
    def root(self) -> Path:
        return self.home / "cache"

    def note(self, what: str, text: str) -> None:
        self.counts[what] += 1
        self.notes.append(f"{what}: {text}")

    def some(self) -> list[Any]:
        """Some of the kernels, in any order."""
        return self.chance.sample(self.kernels, self.chance.randint(1, len(self.kernels)))

    def start(self, kernels: Sequence[Any], **how: Any) -> Builder:
        builder = Builder(self, list(kernels), **how)
        self.builders.append(builder)
        return builder

    def crowd(self) -> None:
        """Builders that nothing happens to."""
        for _ in range(self.chance.choice([1, 2, 4, _MOST_BUILDERS])):
            self.start(self.some())


class Builder:
    """A process that builds kernels and compares what it gets with what the compiler must have written."""

    def __init__(
        self, round_: Round, kernels: list[Any], *, prepare: Callable[[], Any] | None = None, **options: Any
    ) -> None:
        """`prepare` runs in the process before it builds: it arms the fault, and may return what disarms it before the
        result is looked at. `options` are those of `build.build`."""
        self.kernels = kernels
        self.killed = False
        self.report = round_.home / f"report-{len(round_.builders)}"
        self.pid = os.fork()
        if self.pid == 0:
            try:
                code = _work(round_, kernels, self.report, prepare, options)
            except BaseException:
                code = _UNCLEAR
            os._exit(code)

    def kill(self) -> None:
        self.killed = True
        os.kill(self.pid, signal.SIGKILL)

    def join(self, deadline: float) -> int | None:
        """The exit code, negative for a signal; None if it had to be stopped at the deadline."""
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.killed |= code == -signal.SIGKILL
                return code
            time.sleep(0.002)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return None


def _work(
    round_: Round, kernels: list[Any], report: Path, prepare: Callable[[], Any] | None, options: dict[str, Any]
) -> int:
    said = report.open("w")  # before the disk is full, or the user is another
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            disarm = None if prepare is None else prepare()
            artifacts = build.build(kernels, emulate=round_.emulate, **options)
            if disarm is not None:
                disarm()
        wrong = [
            artifact.slug
            for kernel, artifact in zip(kernels, artifacts, strict=True)
            if (artifact.slug, artifact.binary.read_bytes()) != (kernel.slug, _right(round_, kernel))
        ]
    except FagenError as error:
        said.write(f"{type(error).__name__}: {error}")
        return _REFUSED
    except BaseException:
        said.write(traceback.format_exc())
        return _UNCLEAR
    else:
        said.write(" ".join(wrong))
        return _WRONG if wrong else _RIGHT
    finally:
        sys.settrace(None)
        said.close()


def _right(round_: Round, kernel: Any) -> bytes:
    return round_.stub.binary_of(render(kernel, "emulate" if round_.emulate else "cuda"))


# Faults


def cold(round_: Round) -> None:
    """Up to 16 processes on one cold cache."""
    for _ in range(round_.chance.choice([8, _MOST_BUILDERS])):
        round_.start(round_.some())


def killed_at_a_line(round_: Round) -> None:
    """Builders killed anywhere from the first look-up to the last clean-up, with others at work beside them."""
    lines = lines_of_a_build(round_)
    for _ in range(round_.chance.randint(1, 3)):
        wanted, line = round_.some(), round_.chance.randint(1, lines)
        round_.start(wanted, prepare=lambda line=line: kill_at_line(line))
        _allow(round_, wanted)
    round_.crowd()


def killed_at_a_time(round_: Round) -> None:
    """Builders killed while compilers run, which are left without a parent."""
    victims = [round_.start(round_.some(), jobs=2) for _ in range(round_.chance.randint(1, 3))]
    round_.crowd()
    for victim in victims:
        time.sleep(round_.chance.uniform(0, 0.1))
        victim.kill()
        _allow(round_, victim.kernels)


def damaged(round_: Round) -> None:
    """Artifacts truncated, emptied, with a bit flipped, without a file, with a directory in a file's place."""
    _fill(round_)
    for directory in _artifacts(round_):
        if round_.chance.random() < 0.7:
            damage(round_.chance, directory)
            _allow(round_, [kernel for kernel in round_.kernels if directory.name.startswith(kernel.slug)])
    round_.crowd()


def disk_full(round_: Round) -> None:
    """A file system with room for a part of the artifacts. Afterwards there is room for all."""
    round_.may_refuse, round_.judged = True, False
    room = round_.chance.randint(16, 120)
    with _small_disk(round_, room * 1024) as mounted:
        if not mounted:
            for _ in range(round_.chance.randint(1, 4)):
                _failing(round_, errno.ENOSPC)
            _join(round_)
        else:
            round_.crowd()
            _join(round_)
            _run("mount", "-o", "remount,size=16m", str(round_.root))
        _look(round_)


def failing_calls(round_: Round) -> None:
    """A call of the file system fails: no space, no permission, an input error; and the rename that publishes meets
    another which is then gone."""
    round_.may_refuse, round_.judged = True, False
    for _ in range(round_.chance.randint(1, 4)):
        codes = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS, errno.ENOTEMPTY)
        _failing(round_, round_.chance.choice(codes))
    round_.crowd()


def without_locks(round_: Round) -> None:
    """Every builder believes that it holds the lock, as where locks do nothing: all but one lose the rename."""
    round_.judged = False

    @contextmanager
    def granted(root: Path, name: str, *, wait: bool = True) -> Iterator[bool]:
        yield True

    def disarm() -> None:
        cache.lock = granted

    for _ in range(round_.chance.randint(2, 8)):
        round_.start(round_.some(), prepare=disarm)


def vanishing(round_: Round) -> None:
    """Somebody removes artifacts, locks, working directories or the whole cache while builders are at work."""
    round_.may_refuse, round_.judged = True, False
    if round_.chance.random() < 0.5:
        _fill(round_)
    round_.crowd()
    for _ in range(round_.chance.randint(1, 5)):
        time.sleep(round_.chance.uniform(0, 0.05))
        places = [round_.root, round_.root / ".locks", round_.root / ".tmp", *_artifacts(round_)]
        shutil.rmtree(round_.chance.choice(places), ignore_errors=True)


def cleaning(round_: Round) -> None:
    """`fagen clean` at the same time, and builders with --force: some are killed."""
    round_.judged = False
    _fill(round_)
    lines = lines_of_a_build(round_)
    for _ in range(round_.chance.randint(1, 3)):
        line = round_.chance.randint(1, 2 * lines)

        def clean(line: int = line) -> None:
            kill_at_line(line)
            cache.clean()

        round_.start([], prepare=clean)
    for _ in range(round_.chance.randint(1, 4)):
        round_.start(round_.some(), force=round_.chance.random() < 0.5)
    line = round_.chance.randint(1, 2 * lines)
    round_.start(round_.some(), prepare=lambda: kill_at_line(line), force=True)


def skewed(round_: Round) -> None:
    """Clocks that differ by days between processes and from the file system's, and a killed builder's remains."""
    wanted = round_.some()
    line = round_.chance.randint(1, lines_of_a_build(round_))
    round_.start(wanted, prepare=lambda: kill_at_line(line))
    _allow(round_, wanted)
    _join(round_)
    for path in [round_.root, *round_.root.rglob("*")]:
        moment = time.time() + round_.chance.uniform(-1e7, 1e7)
        with suppress(FileNotFoundError):  # of a compiler that has lost its parent
            os.utime(path, (moment, moment))
    for _ in range(round_.chance.randint(1, 6)):
        offset = round_.chance.uniform(-1e7, 1e7)

        def shift(offset: float = offset, real: Callable[[], float] = time.time) -> None:
            time.time = lambda: real() + offset

        round_.start(round_.some(), prepare=shift)


def read_only(round_: Round) -> None:
    """A warm cache that the user may only read, and a part of it that is not there."""
    if os.geteuid() != 0:
        return cold(round_)
    round_.judged = False
    _fill(round_)
    directories = _artifacts(round_)
    shutil.rmtree(round_.chance.choice(directories))
    own = round_.home / "own"
    own.mkdir()
    own.chmod(0o1777)
    round_.home.chmod(0o755)
    _become_readable(round_)
    for _ in range(round_.chance.randint(1, 4)):
        round_.start(round_.some(), prepare=lambda: _become_other_user(own))
    return None


def foreign(round_: Round) -> None:
    """A cache that belongs to another user: of it no library is loaded, with one error that says what to do."""
    if os.geteuid() != 0:
        return cold(round_)
    round_.judged, round_.may_refuse = False, round_.emulate
    _fill(round_)
    os.chown(round_.root, OTHER_USER, OTHER_USER)
    round_.crowd()
    _join(round_, refused=len(round_.builders) if round_.emulate else 0)
    os.chown(round_.root, 0, 0)
    return None


FAULTS: dict[str, Callable[[Round], None]] = {
    fault.__name__: fault
    for fault in (
        *(cold, killed_at_a_line, killed_at_a_time, damaged, disk_full, failing_calls, without_locks, vanishing),
        *(cleaning, skewed, read_only, foreign),
    )
}


def kill_at_line(number: int) -> None:
    """This process ends, at the line of fagen's build or cache that it runs as the `number`th from now."""
    left = number

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in _TRACED:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


_LINES: dict[int, int] = {}


def lines_of_a_build(round_: Round) -> int:
    """How many lines a cold build of that many kernels runs."""
    count = len(round_.kernels)
    if count not in _LINES:
        seen = 0

        def trace(frame: Any, event: str, argument: Any) -> Any:
            nonlocal seen
            if frame.f_code.co_filename not in _TRACED:
                return None
            seen += event == "line"
            return trace

        with tempfile.TemporaryDirectory() as folder:
            previous = os.environ["FAGEN_CACHE_DIR"]
            os.environ["FAGEN_CACHE_DIR"] = folder
            before = round_.stub.count_file.read_bytes() if round_.stub.count_file.exists() else b""
            sys.settrace(trace)
            try:
                build.build(round_.kernels, emulate=round_.emulate)
            finally:
                sys.settrace(None)
                os.environ["FAGEN_CACHE_DIR"] = previous
                round_.stub.count_file.write_bytes(before)
        _LINES[count] = seen
    return _LINES[count]


def damage(chance: random.Random, directory: Path) -> None:
    """Does one thing to one file of an artifact, after which it is not whole; or to all of them."""
    path = chance.choice(sorted(directory.iterdir()))
    how = chance.choice(["flip", "flip", "empty", "truncate", "grow", "remove", "folder", "all"])
    data = bytearray(path.read_bytes())
    if how == "flip" and data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
    elif how == "truncate":
        os.truncate(path, len(data) // 2)
    elif how == "grow":
        path.write_bytes(data + b"\0")
    elif how == "remove":
        path.unlink()
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "all":
        for file in directory.iterdir():
            file.unlink()
    else:
        path.write_bytes(b"")


def _failing(round_: Round, code: int) -> None:
    """A builder in which one call of the file system fails."""
    number = round_.chance.randint(1, 60)

    def arm() -> Callable[[], None]:
        left = number

        def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                if str(round_.root) in f"{arguments} {named}":
                    left -= 1
                    if left == 0:
                        raise OSError(code, os.strerror(code), str(arguments[0]) if arguments else None)
                return function(*arguments, **named)

            return call

        for owner, names in (
            (Path, ("write_text", "write_bytes", "read_bytes", "mkdir", "rename", "chmod", "iterdir", "stat")),
            (os, ("open", "utime", "rename")),
            (cache.tempfile, ("mkdtemp",)),
        ):
            for name in names:
                setattr(owner, name, wrapped(getattr(owner, name)))

        def disarm() -> None:
            nonlocal left
            left = 0

        return disarm

    round_.start(round_.some(), prepare=arm)


@contextmanager
def _small_disk(round_: Round, size: int) -> Iterator[bool]:
    """A file system of `size` bytes in the cache's place, where this user can make one."""
    round_.root.mkdir()
    mounted = os.geteuid() == 0 and _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(round_.root))
    try:
        yield mounted
    finally:
        if mounted:
            _run("umount", "-l", str(round_.root))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _become_readable(round_: Round) -> None:
    """All may read the cache and run the compiler."""
    for path in [*round_.root.rglob("*"), round_.root]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for path in round_.stub.path.parent.iterdir():
        path.chmod(0o777 if path.name in (round_.stub.path.name, "launcher") else 0o666)


def _become_other_user(own: Path) -> None:
    os.setgroups([])
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)
    os.environ["TMPDIR"] = str(own)
    tempfile.tempdir = None
    cache._user_dir = lambda: None


# What is counted


def _fill(round_: Round) -> None:
    build.build(round_.kernels, emulate=round_.emulate)


def _artifacts(round_: Round) -> list[Path]:
    try:
        return sorted(path for path in round_.root.iterdir() if path.name.startswith("fwd_"))
    except FileNotFoundError:
        return []


def _allow(round_: Round, kernels: Sequence[Any]) -> None:
    """One compilation more of each: a killed builder's, or that in place of a damaged artifact."""
    round_.wasted.update(kernel.slug for kernel in kernels)


def _join(round_: Round, refused: int | None = None) -> None:
    """Waits for all builders and judges them; `refused` is how many must have met an error of fagen's."""
    deadline = time.monotonic() + _HANG_SECONDS
    errors = 0
    for builder in round_.builders:
        code = builder.join(deadline)
        said = builder.report.read_text() if builder.report.exists() else ""
        if code is None:
            round_.note("hang", f"builder of {[kernel.slug for kernel in builder.kernels]}")
        elif code == _WRONG:
            round_.note("wrong", said)
        elif code == _REFUSED:
            errors += 1
            if not round_.may_refuse or not said.startswith(CacheError.__name__) or "\n" in said:
                round_.note("unclear", said)
        elif code != _RIGHT and not (code == -signal.SIGKILL and builder.killed):
            vanished = "FileNotFoundError" in said and "artifact.binary.read_bytes" in said
            if not (vanished and not round_.judged):  # removed by another after it was handed out
                round_.note("unclear", f"exit {code}: {said}")
    if refused is not None and errors != refused:
        round_.note("wrong", f"{errors} builders were refused, not {refused}")
    round_.builders.clear()


def _look(round_: Round) -> None:
    """The cache as the next user finds it: all is built or found, then all is found, whole and without a remark."""
    for attempt in ("first", "second"):
        compiled = len(round_.stub.compilations)
        builder = Builder(round_, round_.kernels, prepare=None if attempt == "first" else _strict)
        code = builder.join(time.monotonic() + _HANG_SECONDS)
        if code is None:
            round_.note("hang", f"{attempt} build afterwards")
        elif code == _WRONG:
            round_.note("wrong", builder.report.read_text())
        elif code != _RIGHT:
            round_.note("unreadable", f"{attempt} build afterwards: {builder.report.read_text()}")
        if attempt == "second" and len(round_.stub.compilations) != compiled:
            round_.note("duplicate", "what was just built is built again")
    for entry in cache.entries():
        try:
            cache.read(entry.directory)
        except (FileNotFoundError, cache.CorruptArtifact) as error:
            round_.note("unreadable", f"{entry.directory.name}: {error}")
    deadline = time.monotonic() + 5
    while ((round_.root / ".tmp").exists() or any(round_.root.glob(".launch/*"))) and time.monotonic() < deadline:
        cache.sweep(round_.root)  # compilers without a parent may still be writing
        launched.sweep(round_.root)
        time.sleep(0.01)
    kept = {path.name for path in _artifacts(round_)} | {".locks", ".launch"}
    extra = {path.name for path in round_.root.iterdir()} - kept
    extra |= {f".launch/{path.name}" for path in round_.root.glob(".launch/*")}
    if extra:
        round_.note("unreadable", f"left behind: {sorted(extra)}")


def _strict() -> None:
    warnings.simplefilter("error")


def run_round(fault: str, seed: int, folder: Path) -> Round:
    """One round of `fault` in `folder`. The same seed draws the same round; what the processes do is up to them."""
    chance = random.Random(f"{fault} {seed}")
    emulate = chance.random() < 0.5
    home = Path(tempfile.mkdtemp(prefix="round-", dir=folder))
    version = "c++ (Test) 2" if emulate else "13.0.88"
    stub = Stub(home / "bin" / ("c++" if emulate else "nvcc"), version=version, host=emulate)
    texts = ["PAUSE" if chance.random() < 0.4 else "int x;" for _ in range(chance.randint(1, 6))]
    kernels = [
        make_kernel(slug=f"fwd_{name}_sm90", text=f"{text} // {name}", spec=FakeSpec(name))
        for name, text in zip("abcdef", texts, strict=False)
    ]
    round_ = Round(chance, home, emulate, stub, kernels)
    os.environ["FAGEN_CACHE_DIR"] = str(round_.root)
    os.environ["FAGEN_CXX" if emulate else "FAGEN_NVCC"] = str(stub.path)
    os.environ.pop("FAGEN_LAUNCHER", None)
    if not emulate and chance.random() < 0.3 and fault != "without_locks":  # the folder of a launcher needs its lock
        launcher = home / "bin" / "launcher"
        launcher.write_text('#!/bin/sh\nexec "$@"\n')
        launcher.chmod(0o755)
        os.environ["FAGEN_LAUNCHER"] = str(launcher)
    try:
        FAULTS[fault](round_)
        _join(round_)
        if fault != "disk_full":  # it looks while its file system is there
            _look(round_)
        if round_.judged:
            # A compiler that lost its parent may find its source swept away, and compiles nothing.
            made = Counter(line.split()[1] for line in stub.compilations if line)
            for slug, count in made.items():
                if count > 1 + round_.wasted[slug]:
                    round_.note("duplicate", f"{slug} compiled {count} times, {round_.wasted[slug]} may be in vain")
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return round_


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Builds while things go wrong.")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", choices=sorted(FAULTS), action="append", help="only these; default: all in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(arguments)
    for name in [name for name in os.environ if name.startswith("FAGEN_") or name in ("CXX", "MAX_JOBS")]:
        del os.environ[name]
    fagen.render.render = render
    toolchain.driver_version = lambda: None
    faults = options.fault or list(FAULTS)
    total: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fagen-soak-") as folder:
        os.chmod(folder, 0o755)
        for index in range(options.rounds):
            fault = faults[index % len(faults)]
            seed = options.seed + index // len(faults)
            round_ = run_round(fault, seed, Path(folder))
            ran[fault] += 1
            total += round_.counts
            for note in round_.notes:
                print(f"{fault}, seed {seed}: {note}", file=sys.stderr)
    seconds = time.monotonic() - start
    counts = {name: total[name] for name in COUNTS}
    if options.json:
        print(json.dumps({"rounds": dict(ran), "seconds": round(seconds, 1), **counts}))
    else:
        print(f"{options.rounds} rounds in {seconds:.0f} s: " + ", ".join(f"{name} {counts[name]}" for name in COUNTS))
    return int(any(counts.values()))


if __name__ == "__main__":
    sys.exit(main())
