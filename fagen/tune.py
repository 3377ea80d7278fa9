"""Finds the fastest tile of a kernel on a card: compiles what fits, checks it, and times it beside the table's.

What decides is here, what computes is not: `tune` knows only a `Device`, which checks kernels and times them. That of a
GPU is `tune_card.Card`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Protocol

from fagen import build as builder
from fagen import cache, tuned
from fagen.arch import Arch, ranges
from fagen.arch.tiles import LinearTile
from fagen.bench import decode as decode_bench
from fagen.bench import speed
from fagen.cache import Artifact
from fagen.check import pair_of_heads
from fagen.driver import Gpu
from fagen.errors import BuildError, LaunchError, SpecError
from fagen.plan import KernelPlan, Kind, Tile, plan
from fagen.prepared import MOST_DECODE_ROWS
from fagen.spec import AttentionSpec
from fagen.tuned import Entry, Figure

NOISE = 0.01  # a tile that is faster by less is not; nor may it be slower by more on any shape
LENGTHS = (1024, 4096, 16384)  # of sequences, where none are given
DECODE_BATCH = 16
_PAGE = 16  # keys, as the cases have them

# All that fit run twice on one shape, in groups; the best of them a few times on all shapes; the best of those in full.
_GROUP, _SCREENED, _FINALISTS = 32, 24, 6
_SCREEN_SAMPLES, FEW_SAMPLES = 2, 5
SHIPPED = "shipped"

Progress = Callable[[str, int], AbstractContextManager[Callable[[str], None]]]


@dataclass(frozen=True)
class Shape:
    """One problem to time: `batch` sequences of `seqlen_q` queries and `seqlen_k` keys, `heads` of q over `heads_k`."""

    batch: int
    heads: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int

    @property
    def name(self) -> str:
        """For a table: "B=4 4k"."""
        return f"B={self.batch} {speed.short_length(self.seqlen_k)}"


class Device(Protocol):
    """Where kernels run."""

    @property
    def card(self) -> Gpu:
        """Which card it is."""

    def check(self, spec: AttentionSpec, kernels: Sequence[KernelPlan]) -> str | None:
        """Why the kernels of `spec` are not right, on a small case; None where they are."""

    def time(
        self,
        spec: AttentionSpec,
        kind: Kind,
        contestants: Mapping[str, Sequence[KernelPlan]],
        shape: Shape,
        samples: int,
    ) -> dict[str, float | str]:
        """Median seconds of a call of each of the contestants, all kernels of `spec` each, in turns; of gradients where
        `kind` is a kernel of theirs. In place of them why one is out, such as that its result is not that of SHIPPED,
        which is one of them."""


@dataclass(frozen=True)
class Timed:
    """A tile that was timed in full: seconds a call of each shape. `registers` and `spills`, bytes, are a thread's."""

    tile: Tile
    seconds: tuple[float, ...]
    ratios: tuple[float, ...]  # how many times as fast as the table's tile
    registers: int | None
    spills: int | None

    @property
    def gain(self) -> float:
        """Geometric mean of the ratios."""
        return statistics.geometric_mean(self.ratios)


@dataclass(frozen=True)
class Outcome:
    """What came of one kernel. Of the tiles of the range, `considered`, some fit, some of those neither spill nor
    serialize more than the table's, and some of those are right; `dropped` has those that are not, with the reasons.

    `timed`: the best in full, and the table's tile, by gain. `winner` is None where the table's stays.
    """

    kernel: KernelPlan  # with the table's tile
    considered: int
    fitting: int
    compiled: int
    right: int
    shapes: tuple[Shape, ...]
    timed: tuple[Timed, ...]
    winner: Timed | None
    dropped: tuple[tuple[Tile, str], ...] = ()

    def entry(self, card: Gpu, compiler: str, day: date) -> Entry | None:
        """The winner for the file."""
        if self.winner is None:
            return None
        shipped = next(one for one in self.timed if one.tile == self.kernel.tile)
        pairs = zip(self.shapes, self.winner.seconds, shipped.seconds, strict=True)
        return tuned.entry_of(
            replace(self.kernel, tile=self.winner.tile),
            card,
            compiler,
            gain=self.winner.gain,
            figures=[Figure(shape=asdict(shape), seconds=mine, shipped_seconds=other) for shape, mine, other in pairs],
            date=day.isoformat(),
        )


def shapes(
    spec: AttentionSpec,
    *,
    batch: int | None = None,
    heads: int | None = None,
    heads_k: int | None = None,
    seqlens: Sequence[int] = (),
    seqlen_q: int | None = None,
) -> tuple[Shape, ...]:
    """The problems to time: as many tokens and columns as the rows of `fagen bench` where nothing else is given, and
    for split keys those of `fagen bench --decode`. SpecError for heads or keys that do not go together."""
    if spec.split_kv:
        heads = decode_bench.HEADS if heads is None else heads
        heads_k = heads_k or (decode_bench.HEADS_K if heads % decode_bench.HEADS_K == 0 else heads)
        pairs = [(row.batch, row.keys) for row in decode_bench.rows()]
        if seqlens:
            pairs = [(DECODE_BATCH, seqlen) for seqlen in seqlens]
        seqlen_q = seqlen_q or 1
    else:
        heads = max(1, speed.WIDTH // spec.head_dim) if heads is None else heads
        heads_k = heads_k or heads
        pairs = [(max(1, speed.TOKENS // seqlen), seqlen) for seqlen in seqlens or LENGTHS]
    pair_of_heads(heads, heads_k)
    for _, seqlen in pairs if spec.paged else ():
        if seqlen % _PAGE:
            raise SpecError(f"--seqlen {seqlen}: with pages, a multiple of {_PAGE}")
    return tuple(
        Shape(batch or default, heads, heads_k, seqlen_q or seqlen, seqlen) for default, seqlen in dict.fromkeys(pairs)
    )


def kinds(spec: AttentionSpec, arch: Arch, chosen: Sequence[Shape]) -> tuple[Kind, ...]:
    """The kernels of `spec` on `arch` that have a tile to choose and run for such shapes.

    SpecError with dropout, and for split keys where some shapes run another kernel than others.
    """
    if spec.dropout:
        raise SpecError(
            "with dropout a kernel has the tile that was tuned without it, so that a probability of 0 gives the same "
            "bits: tune it without --dropout"
        )
    if spec.split_kv:
        of_shapes = {shape.seqlen_q * (shape.heads // shape.heads_k) <= MOST_DECODE_ROWS for shape in chosen}
        if len(of_shapes) > 1:
            raise SpecError("some of the shapes run the kernel for few query rows and some do not: tune them apart")
        return ("decode",) if of_shapes == {True} else ("fwd",)
    return tuple(kernel.kind for kernel in plan(spec, arch) if any(ranges.tiles(kernel.kind, kernel.tile)))


@contextmanager
def _silent(_verb: str, _total: int) -> Iterator[Callable[[str], None]]:
    yield lambda name: None


def tune(
    spec: AttentionSpec,
    arch: Arch,
    device: Device,
    chosen: Sequence[Shape],
    wanted: Sequence[Kind] | None = None,
    *,
    samples: int = 30,
    jobs: int | None = None,
    progress: Progress = _silent,
) -> tuple[Outcome, ...]:
    """Tunes the kernels `wanted` of `spec`, by default all that `kinds` names, one after the other: the next runs with
    what was found for those before. Nothing is written but the cache, of which what lost is removed.

    Raises what `build` raises, and LaunchError where the card stops.
    """
    wanted = kinds(spec, arch, chosen) if wanted is None else wanted
    table = _tiles(plan(spec, arch))
    base = _tiles(tuned.plan_for(spec, arch, lambda: device.card))
    outcomes = []
    for kind in wanted:
        if tuned.problem(plan(spec, arch, base | {kind: table[kind]})) is not None:
            base = table  # what was tuned of the others goes with what was tuned of this one only
        job = _Job(spec, arch, kind, base | {kind: table[kind]}, device, jobs, progress)
        outcome = job.run(tuple(chosen), samples)
        if outcome.winner is not None:
            base = base | {kind: outcome.winner.tile}
        outcomes.append(outcome)
    return tuple(outcomes)


def candidates(spec: AttentionSpec, arch: Arch, kind: Kind, base: Mapping[Kind, Tile]) -> tuple[int, list[Tile]]:
    """How many tiles the range has for the kernel, and those that fit beside the tiles `base` of the others, without
    that of `base` itself. Of several that compile to the same instructions, one."""
    shipped = _kernel(plan(spec, arch, base), kind)
    fitting: dict[Tile, None] = {}
    considered = 0

    def one_of(kernel: KernelPlan) -> Tile:
        # How many parts keys are split into follows from the blocks a multiprocessor.
        return kernel.tile if kind == "decode" else ranges.largest(kernel.tile, arch, kernel.smem_bytes)

    for tile in ranges.tiles(kind, shipped.tile):
        considered += 1
        try:
            kernels = plan(spec, arch, {**base, kind: tile})
        except SpecError:  # more shared memory than there is
            continue
        if tuned.problem(kernels) is None:
            fitting[one_of(_kernel(kernels, kind))] = None
    fitting.pop(one_of(shipped), None)
    return considered, list(fitting)


def qualify(ratios: Mapping[str, Sequence[float]]) -> list[str]:
    """Those that are faster than the table's tile by more than noise in the mean over the shapes, and on none of them
    slower by more, the fastest first. `ratios`: how many times as fast on each shape."""
    gains = {name: statistics.geometric_mean(of_shapes) for name, of_shapes in ratios.items()}
    fast = [name for name in ratios if gains[name] > 1 + NOISE and min(ratios[name]) >= 1 - NOISE]
    return sorted(fast, key=lambda name: -gains[name])


class _Job:
    """One kernel to tune."""

    def __init__(
        self,
        spec: AttentionSpec,
        arch: Arch,
        kind: Kind,
        base: Mapping[Kind, Tile],
        device: Device,
        jobs: int | None,
        progress: Progress,
    ) -> None:
        self._spec, self._arch, self._kind, self._base = spec, arch, kind, base
        self._device, self._jobs, self._progress = device, jobs, progress
        self._shipped = _kernel(self._plans(base[kind]), kind)
        self._artifacts: dict[Tile, Artifact] = {}
        self._built: list[Artifact] = []  # here, not found in the cache
        self._others: dict[KernelPlan, Artifact] = {}  # that run beside the kernel
        self._dropped: dict[Tile, str] = {}

    def run(self, chosen: tuple[Shape, ...], samples: int) -> Outcome:
        table = self._shipped.tile
        considered, fitting = candidates(self._spec, self._arch, self._kind, self._base)
        self._compile([table, *fitting])
        if table not in self._artifacts:
            raise BuildError(f"{self._shipped.slug}: {self._dropped[table]}")
        compiled = [tile for tile in fitting if tile in self._artifacts and not self._costs_more(tile)]
        self._compile_others([table, *compiled])
        right = self._checked([table, *compiled])
        if table not in right:
            raise LaunchError(f"{self._shipped.slug} is not right here: {self._dropped[table]}")
        winner: Timed | None = None
        timed = self._race(right, chosen, samples)
        named = {str(index): one for index, one in enumerate(timed) if one.tile != table}
        for name in qualify({name: one.ratios for name, one in named.items()}):
            reason = self._problem_with_dropout(named[name].tile)
            if reason is None:
                winner = named[name]
                break
            self._dropped[named[name].tile] = f"with dropout, {reason}"
        self._clean({table} if winner is None else {table, winner.tile})
        return Outcome(
            kernel=self._shipped,
            considered=considered,
            fitting=len(fitting),
            compiled=len(compiled),
            right=len(right) - 1,
            shapes=chosen,
            timed=tuple(timed),
            winner=winner,
            dropped=tuple(self._dropped.items()),
        )

    def _plans(self, tile: Tile) -> tuple[KernelPlan, ...]:
        return plan(self._spec, self._arch, {**self._base, self._kind: tile})

    def _compile(self, tiles: Sequence[Tile]) -> None:
        """Builds the kernel with each tile. What does not compile is dropped."""
        kernels = {tile: _kernel(self._plans(tile), self._kind) for tile in tiles}
        with self._progress("compiling", len(kernels)) as step:
            try:
                artifacts = builder.build(
                    list(kernels.values()), jobs=self._jobs, on_done=lambda artifact: step(artifact.slug)
                )
                found = dict(zip(kernels, artifacts, strict=True))
            except BuildError:  # some failed, and the rest is in the cache now
                found = {}
                for tile, kernel in kernels.items():
                    try:
                        (found[tile],) = builder.build([kernel], jobs=self._jobs)
                    except BuildError as error:
                        self._dropped[tile] = error.reason
        self._artifacts |= found
        self._built += [artifact for artifact in found.values() if not artifact.cached]

    def _compile_others(self, tiles: Sequence[Tile]) -> None:
        """Builds what runs beside the kernel, some of which has its tile, at once: `load` would build one by one."""
        others = [kernel for tile in tiles for kernel in self._plans(tile) if kernel.kind != self._kind]
        others = list(dict.fromkeys(others))
        self._others = dict(zip(others, builder.build(others, jobs=self._jobs), strict=True))
        self._built += [artifact for artifact in self._others.values() if not artifact.cached]

    def _costs_more(self, tile: Tile) -> bool:
        return _costs_more(self._artifacts[tile], self._artifacts[self._shipped.tile])

    def _checked(self, tiles: Sequence[Tile]) -> list[Tile]:
        right = []
        with self._progress("checking", len(tiles)) as step:
            for tile in tiles:
                reason = self._device.check(self._spec, self._plans(tile))
                if reason is None:
                    right.append(tile)
                else:
                    self._dropped[tile] = reason
                step(str(tile))
        return right

    def _race(self, tiles: Sequence[Tile], chosen: Sequence[Shape], samples: int) -> list[Timed]:
        """The best of `tiles`, the first of which is the table's, by gain, timed in full."""
        names = {SHIPPED if index == 0 else str(index): tile for index, tile in enumerate(tiles)}
        others = [name for name in names if name != SHIPPED]
        middle = chosen[len(chosen) // 2]
        groups = [others[begin : begin + _GROUP] for begin in range(0, len(others), _GROUP)]
        with self._progress("timing", len(groups) + 2 * len(chosen)) as step:
            ratios: dict[str, float] = {}
            for group in groups:
                (of_group,) = self._times(names, group, [middle], _SCREEN_SAMPLES, step)
                ratios |= {name: of_group[SHIPPED] / seconds for name, seconds in of_group.items()}
            screened = sorted((name for name in others if name in ratios), key=lambda name: -ratios[name])
            heat = self._times(names, screened[:_SCREENED], chosen, FEW_SAMPLES, step)
            finalists = sorted(_in_all(heat), key=lambda name: -_gain(heat, name))[:_FINALISTS]
            final = self._times(names, finalists, chosen, samples, step)
        timed = [self._timed(names[name], final, name) for name in [SHIPPED, *_in_all(final)]]
        return sorted(timed, key=lambda one: -one.gain)

    def _times(
        self,
        names: Mapping[str, Tile],
        some: Sequence[str],
        chosen: Sequence[Shape],
        samples: int,
        step: Callable[[str], None],
    ) -> list[dict[str, float]]:
        """Seconds of `some` and of SHIPPED on each shape; who is out has none from there on."""
        found: list[dict[str, float]] = []
        for shape in chosen:
            running = [name for name in some if names[name] not in self._dropped]
            contestants = {name: self._plans(names[name]) for name in [SHIPPED, *running]}
            taken = self._device.time(self._spec, self._kind, contestants, shape, samples)
            found.append({name: value for name, value in taken.items() if not isinstance(value, str)})
            for name, value in taken.items():
                if isinstance(value, str):
                    self._dropped[names[name]] = f"{shape.name}: {value}"
            if SHIPPED not in found[-1]:
                raise LaunchError(f"{self._shipped.slug}: {taken[SHIPPED]}")
            step(shape.name)
        return found

    def _timed(self, tile: Tile, times: Sequence[Mapping[str, float]], name: str) -> Timed:
        resources = self._artifacts[tile].resources
        return Timed(
            tile,
            tuple(of_shape[name] for of_shape in times),
            tuple(of_shape[SHIPPED] / of_shape[name] for of_shape in times),
            None if resources is None else resources.registers,
            None if resources is None else resources.spill_stores + resources.spill_loads,
        )

    def _problem_with_dropout(self, tile: Tile) -> str | None:
        """Why the tile is none for the kernel with dropout, which has it too; None where it is one."""
        spec = self._spec.model_copy(update={"dropout": True})
        table = _tiles(plan(spec, self._arch))
        tiles = {}
        for kind, one in {**self._base, self._kind: tile}.items():
            tiles[kind] = ranges.with_dropout(table[kind], one) or table[kind]
        kernels = plan(spec, self._arch, tiles)
        mine, theirs = (_kernel(some, self._kind) for some in (kernels, plan(spec, self._arch)))
        if mine.tile == theirs.tile:
            return None
        reason = tuned.problem(kernels)
        if reason is not None:
            return reason
        try:
            artifacts = builder.build([mine, theirs, *kernels], jobs=self._jobs)
        except BuildError as error:
            return error.reason
        self._built += [artifact for artifact in artifacts if not artifact.cached]
        if _costs_more(*artifacts[:2]):
            return "it spills"
        return self._device.check(spec, kernels)

    def _clean(self, kept: set[Tile]) -> None:
        """Removes what was built here and lost."""
        stay = {self._artifacts[tile].directory for tile in kept}
        stay |= {self._others[one].directory for tile in kept for one in self._plans(tile) if one.kind != self._kind}
        gone = {artifact.directory for artifact in self._built} - stay
        if gone:
            cache.clean(lambda entry: entry.directory in gone)


def _costs_more(artifact: Artifact, table: Artifact) -> bool:
    """Whether a kernel spills more than that with the table's tile, or waits for each product of its own."""
    if "serialized" in artifact.log and "serialized" not in table.log:
        return True
    if artifact.resources is None or table.resources is None:
        return False
    mine, theirs = (one.spill_stores + one.spill_loads for one in (artifact.resources, table.resources))
    return mine > theirs


def _in_all(times: Sequence[Mapping[str, float]]) -> list[str]:
    """Who has figures on all shapes, but for SHIPPED."""
    return [name for name in times[0] if name != SHIPPED and all(name in of_shape for of_shape in times)]


def _gain(times: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.geometric_mean(of_shape[SHIPPED] / of_shape[name] for of_shape in times)


def _kernel(kernels: Sequence[KernelPlan], kind: Kind) -> KernelPlan:
    return next(kernel for kernel in kernels if kernel.kind == kind)


def _tiles(kernels: Sequence[KernelPlan]) -> dict[Kind, Tile]:
    """Those that can be chosen."""
    return {
        kernel.kind: kernel.tile
        for kernel in kernels
        if not isinstance(kernel.tile, LinearTile) and kernel.kind != "bwd_convert"
    }
