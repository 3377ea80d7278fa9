"""What a saved template does to kernels: rendered, built, run and judged again, beside the last run that was right.

One process watches and compares; it renders, and never imports torch. Each verdict is made in a process of its own that
was started beforehand (`watch_worker`): a kernel that crashes or hangs ends that process alone, and no verdict waits
for an import.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fagen import inspection, registry
from fagen import render as renderer
from fagen.arch import Arch
from fagen.errors import BuildError, FagenError, ToolchainError
from fagen.inspection import Report
from fagen.plan import KernelPlan, plan
from fagen.spec import AttentionSpec

State = Literal["right", "past the budget", "does not render", "does not compile", "stopped"]

_TEMPLATE_SUFFIXES = frozenset({".j2", ".cuh", ".hpp"})
_PACKAGE = Path(__file__).resolve().parent

# Milliseconds. An editor that saves in several steps, or several files, takes less than the first from one to the next;
# saves that never pause are taken together for the second.
_PAUSE, _LONGEST = 50, 400
_POLL = 500  # how long the watching thread waits before it looks whether to stop

_GRACE_SECONDS = 1.0  # in which a process that is told to stop ends its compilers

# Of a report, by the paths of `inspection.compare`: their names and units.
COSTS = {
    "registers": ("registers", ""),
    "spill_stores": ("spill stores", "B"),
    "spill_loads": ("spill loads", "B"),
    "stack": ("stack", "B"),
    "shared_memory.dynamic": ("shared memory, dynamic", "B"),
    "shared_memory.static": ("shared memory, static", "B"),
    "occupancy.blocks": ("blocks a multiprocessor", ""),
}


class Variant(NamedTuple):
    """One spec on one architecture."""

    spec: AttentionSpec
    arch: Arch

    @property
    def kernels(self) -> tuple[KernelPlan, ...]:
        return plan(self.spec, self.arch)

    @property
    def slug(self) -> str:
        return f"{self.spec.slug}_{self.arch.name}"


@dataclass(frozen=True)
class Error:
    """How far off one result of one call is. `ratio` is the larger of error / budget and of what the worst element is
    off by for what it may be; past 1 the result is wrong."""

    result: str  # "o", "lse", "dq", "dk" or "dv"
    call: str
    error: float
    budget: float
    ratio: float
    passed: bool
    worst: str  # the worst element, for people


@dataclass(frozen=True)
class Verdict:
    """What became of a variant."""

    variant: Variant
    state: State
    problem: str = ""  # what the templates, a compiler, the emulator or the card say, where one of them stopped it
    device: str = ""  # the card's name, or "CPU (emulated)"
    calls: int = 0  # that ended
    errors: dict[str, Error] = field(default_factory=dict)  # of each result the worst call's
    failures: tuple[Error, ...] = ()  # past the budget
    reports: tuple[Report, ...] = ()  # a kernel, as `fagen inspect` has them; empty where nothing was built
    seconds: dict[str, float] = field(default_factory=dict)  # "time" and "time of gradients" on a GPU
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.state == "right"


class Row(NamedTuple):
    """One figure. `before` is that of the last good run, None where there was none."""

    name: str
    before: Any
    after: Any
    unit: str  # "budget", "B", "s" or ""


@dataclass(frozen=True)
class Saved:
    """Watched files were saved."""

    paths: tuple[Path, ...]


@dataclass(frozen=True)
class Judged:
    """A verdict and the last good one of the same variant. `seconds`: since the save, or before the first since the
    start."""

    verdict: Verdict
    good: Verdict | None
    seconds: float
    after_save: bool


@dataclass(frozen=True)
class Unchanged:
    """A save left these variants as they were at their last verdict."""

    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Stale:
    """Code of fagen itself was saved, which this process goes on without."""

    paths: tuple[Path, ...]


Event = Saved | Judged | Unchanged | Stale


@dataclass(frozen=True)
class Job:
    """What a verdict is to be made of."""

    variant: Variant
    emulate: bool
    every: bool


# What is watched


def template_folders() -> tuple[Path, ...]:
    """Where a saved template changes kernels."""
    outside = {one.fragment.parent for one in registry.outside().values()}
    return (renderer.template_dir(), *sorted(outside))


def case_table() -> Path | None:
    """The table of calls, in a checkout."""
    path = renderer.template_dir().parent / "tests" / "cases.py"
    return path if path.is_file() else None


def kind_of(path: Path) -> Literal["template", "table", "code"] | None:
    """What a file is to a watcher; None for one that changes nothing, such as an editor's own."""
    if path.name.startswith((".", "#")):
        return None
    if path.suffix in _TEMPLATE_SUFFIXES and any(folder in path.parents for folder in template_folders()):
        return "template"
    if path == case_table():
        return "table"
    return "code" if path.suffix == ".py" and _PACKAGE in path.parents else None


def check_installed() -> None:
    """Raises ToolchainError without the package that watches folders."""
    if importlib.util.find_spec("watchfiles") is None:
        raise ToolchainError("watch needs watchfiles: pip install 'fagen[watch]' (or watchfiles alone)")


class Saves:
    """Saves of watched files, seen by a thread between `with` and its end. `ready` can be waited for."""

    def __init__(self) -> None:
        self.ready, self._found = multiprocessing.Pipe(duplex=False)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Saves:
        self._thread.start()
        self.take()  # until the folders are watched: no save after this is missed
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def take(self) -> frozenset[Path]:
        """The files that were saved last, and which have been in the meantime; waits for some. Raises FagenError where
        the system cannot watch the folders."""
        paths: frozenset[Path] = frozenset()
        while True:
            found = self.ready.recv()
            if isinstance(found, Exception):
                raise FagenError(f"the folders of the templates cannot be watched: {found}") from found
            paths |= found
            if not self.ready.poll():
                return paths

    def _watch(self) -> None:
        table = case_table()
        folders = {*template_folders(), _PACKAGE, *([] if table is None else [table.parent])}
        first = True
        try:
            from watchfiles import watch

            for changes in watch(
                *sorted(folders),
                watch_filter=lambda change, path: kind_of(Path(path)) is not None,
                step=_PAUSE,
                debounce=_LONGEST,
                rust_timeout=_POLL,
                yield_on_timeout=True,
                stop_event=self._stop,
            ):
                if first or changes:
                    self._found.send(frozenset(Path(path) for _, path in changes))
                first = False
        except Exception as error:
            self._found.send(OSError(str(error)))


def saved_at(paths: Sequence[Path]) -> float:
    """When the latest of `paths` was written or renamed into place, in seconds since 1970; now, where all are gone."""
    times = []
    for path in paths:
        with suppress(OSError):
            times.append(path.stat().st_ctime)
    return min(max(times, default=time.time()), time.time())


# Where verdicts are made


class Worker:
    """A process that makes one verdict. It has imported and looked up beforehand what that takes."""

    def __init__(self, variants: Sequence[Variant], emulate: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fagen.watch_worker"])
        self.connection, theirs = context.Pipe()
        self.spent = False
        self._process = context.Process(target=_work, args=(theirs, variants, emulate, _environment()), daemon=True)
        # The first start makes the process that others are forked from, and Ctrl-C would stop it while it imports. What
        # it starts before that process unblocks all signals, so that comes first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()

    def submit(self, job: Job) -> None:
        self.spent = True
        with suppress(BrokenPipeError):  # then it has died, and whoever waits for its answer sees it
            self.connection.send(job)

    def death(self) -> str:
        """How the process ended, once its end of the connection is closed."""
        self._process.join(_GRACE_SECONDS)
        code = self._process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"the process died of {signal.Signals(-code).name}"
        return f"the process ended with exit code {code}"

    def stop(self) -> None:
        """Ends the process and the compilers that it runs."""
        self._process.terminate()
        self._process.join(_GRACE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.connection.close()


def _work(connection: Connection, variants: Sequence[Variant], emulate: bool, environment: Mapping[str, str]) -> None:
    """The process. It sends None when it is ready, is sent a Job, and sends the name of each call as it begins, ""
    behind the last, then a Verdict or an exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the watching process
    signal.signal(signal.SIGTERM, _leave)
    os.environ.update(environment)  # the process that this one is forked from has that of its own start
    os.dup2(2, 1)  # a kernel that prints does not print into results
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError):
        try:
            from fagen import watch_worker

            watch_worker.prepare(variants, emulate)
            connection.send(None)
            connection.send(watch_worker.judge(connection.recv(), connection.send))
        except (FagenError, ModuleNotFoundError) as error:
            connection.send(error)


def _environment() -> dict[str, str]:
    """That of the process, in which the folders of --mods are in FAGEN_MODS: those that this one has loaded."""
    folders = os.pathsep.join(map(str, registry.folders()))
    return dict(os.environ) | ({"FAGEN_MODS": folders} if folders else {})


def _leave(*_: object) -> None:
    raise SystemExit(1)


def _end_with_parent() -> None:
    """A kernel that never ends would outlive a watching process that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


# The watching process

_Texts = tuple[str, ...]  # of the kernels of a variant, or why there are none


class Watcher:
    """Judges `variants` and, with `saves`, goes on to do so after each of them. `every`: with all calls of the
    table that such kernels can make. `limit`: seconds that one call may take before its process is stopped."""

    def __init__(
        self,
        variants: Sequence[Variant],
        *,
        emulate: bool = False,
        every: bool = False,
        limit: float = 60.0,
        saves: Saves | None = None,
    ) -> None:
        self._variants = variants
        self._emulate, self._every, self._limit = emulate, every, limit
        self._saves = saves
        self._worker: Worker | None = None
        self._judged: dict[Variant, tuple[_Texts, Verdict]] = {}
        self._good: dict[Variant, Verdict] = {}

    def __enter__(self) -> Watcher:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._worker is not None:
            self._worker.stop()

    def events(self) -> Iterator[Event]:
        """What happens, without end; without `saves`, one verdict a variant. The text that was saved last always gets a
        verdict: a save while one is made, if it changes the kernels at hand, ends that and begins anew.

        Raises what no other template would change: ToolchainError without a compiler, SpecError for a bad setting.
        """
        began, after_save = time.time(), False
        while True:
            waiting = self._changed()
            if not waiting:
                yield Unchanged(tuple(self._judged[one][1] for one in self._variants))
            while waiting:
                variant = waiting[0]
                texts = self._texts(variant)
                verdict, during = self._verdict(variant, texts)
                yield from self._announce(during)
                if verdict is not None:
                    yield Judged(verdict, self._good.get(variant), time.time() - began, after_save)
                    self._judged[variant] = texts, verdict
                    if verdict.passed:
                        self._good[variant] = verdict
                self._renew()
                if verdict is not None and not during:
                    waiting = waiting[1:]
                    continue
                waiting = self._changed()
                began, after_save = saved_at(sorted(during)), True
            if self._saves is None:
                return
            saved: frozenset[Path] = frozenset()
            while all(kind_of(path) == "code" for path in saved):
                saved = self._saves.take()
                yield from self._announce(saved)
            began, after_save = saved_at(sorted(saved)), True

    def _announce(self, saved: frozenset[Path]) -> Iterator[Event]:
        code = tuple(sorted(path for path in saved if kind_of(path) == "code"))
        rest = tuple(sorted(saved - set(code)))
        if code:
            yield Stale(code)
        if rest:
            yield Saved(rest)

    def _changed(self) -> list[Variant]:
        """Those whose text is not that of their last verdict."""
        return [one for one in self._variants if one not in self._judged or self._judged[one][0] != self._texts(one)]

    def _texts(self, variant: Variant) -> _Texts:
        """All that a verdict depends on and an editor can change: the kernels for both targets, and the calls."""
        table = case_table()
        try:
            calls = "" if table is None else table.read_text(encoding="utf-8")
            targets = get_args(renderer.Target)
            return (calls, *(renderer.render(one, target) for one in variant.kernels for target in targets))
        except (BuildError, OSError, UnicodeDecodeError) as error:
            return (str(error),)

    def _verdict(self, variant: Variant, texts: _Texts) -> tuple[Verdict | None, frozenset[Path]]:
        """The verdict, None where a save made it worthless; and what was saved meanwhile."""
        if len(texts) == 1:
            return Verdict(variant, "does not render", texts[0]), frozenset()
        worker = self._ready()
        saved: frozenset[Path] = frozenset()
        worker.submit(Job(variant, self._emulate, self._every))
        call, deadline = "", None
        verdict: Verdict | None = None
        while verdict is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([worker.connection, *([] if self._saves is None else [self._saves.ready])], left)
            if self._saves is not None and self._saves.ready in ready:
                saved |= self._saves.take()
                if self._texts(variant) != texts:
                    return None, saved
            if worker.connection in ready:
                try:
                    said = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    said = Verdict(variant, "stopped", f"{call or 'while it was built'}: {worker.death()}")
                if isinstance(said, Exception):
                    raise said
                if isinstance(said, Verdict):
                    verdict = said
                else:
                    call, deadline = said, time.monotonic() + self._limit if said else None
            elif not ready:
                verdict = Verdict(variant, "stopped", f"{call}: has not ended within {self._limit:g} s")
        if self._saves is not None and self._texts(variant) != texts:
            # Which may be what it rendered; a moment later their save is told.
            return None, saved | (self._saves.take() if self._saves.ready.poll(_GRACE_SECONDS) else frozenset())
        return verdict, saved

    def _renew(self) -> None:
        """Ends the process that has made a verdict; the next one gets ready while somebody edits."""
        if self._worker is not None and self._worker.spent:
            self._worker.stop()
            self._worker = None if self._saves is None else Worker(self._variants, self._emulate)

    def _ready(self) -> Worker:
        """A process that waits for a job."""
        if self._worker is None:
            self._worker = Worker(self._variants, self._emulate)
        try:
            problem = self._worker.connection.recv()
        except (EOFError, ConnectionResetError):
            raise FagenError(f"no verdict can be made: {self._worker.death()}") from None
        if problem is not None:
            raise problem
        return self._worker


# What changed


def rows(now: Verdict, good: Verdict | None) -> list[Row]:
    """The errors, unless only a part of the calls was made, those costs that are not as in the last good run, and
    times."""
    found = []
    for name, error in now.errors.items() if now.state != "stopped" else ():
        before = good.errors[name].ratio if good is not None and name in good.errors else None
        found.append(Row(f"error of {name}", before, error.ratio, "budget"))
    if good is not None and now.reports:
        found += _changed_costs(good, now)
    for name, seconds in now.seconds.items():
        found.append(Row(name, good and good.seconds.get(name), seconds, "s"))
    return found


def _changed_costs(good: Verdict, now: Verdict) -> Iterator[Row]:
    for difference in inspection.compare(good.reports, now.reports).differences:
        kind = f"{difference.kind}: " if len(now.reports) > 1 else ""
        for path, (name, unit) in COSTS.items():
            if path in difference.changes:
                yield Row(f"{kind}{name}", *difference.changes[path], unit)
