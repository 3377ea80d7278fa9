"""Tiles that `fagen tune` found faster than those of the tables: where they are kept, and when they are used.

One file beside the artifacts, `tuned.json`, has an entry for each kernel: what it computes, the target, the card, the
compiler and the version of fagen that it was found with, and the tile with its figures. An entry counts where all of
these are the same; then `load`, `build` and the other commands take its tile. Kernels for the CPU always have the tiles
of the tables, and so have bundles, which are for other machines.

Dropout has no entries of its own: with a probability of 0 it gives the bits of the kernel without it, whose entry
therefore decides for both.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fagen import __version__, cache, env, toolchain
from fagen.arch import Arch
from fagen.arch.tiles import LinearTile
from fagen.driver import Gpu, gpus
from fagen.errors import CacheError, SpecError, ToolchainError
from fagen.files import replacing
from fagen.plan import KernelPlan, Kind, Tile, plan
from fagen.spec import AttentionSpec

FILE = "tuned.json"
_FORMAT = 1

NO_CARD = "no GPU that PyTorch can use: tiles are timed on one (see fagen doctor)"


@dataclass(frozen=True)
class Figure:
    """What was measured on one shape: seconds of a call with the tile, and with that of the table in the same turns."""

    shape: dict[str, int]
    seconds: float
    shipped_seconds: float


@dataclass(frozen=True)
class Entry:
    """One tile. `spec` are the fields of the kernel's AttentionSpec, without dropout; `gain` is how many times as fast
    as the tile of the table it was, the geometric mean over the shapes."""

    slug: str
    kind: str
    spec: dict[str, Any]
    arch: str
    card: str
    capability: tuple[int, int]
    compiler: str
    fagen: str
    tile: dict[str, int]  # or bool
    gain: float
    figures: tuple[Figure, ...]
    date: str

    @property
    def key(self) -> tuple[Any, ...]:
        """All that must be the same for the tile to be used."""
        return (*self._place, self.compiler, self.fagen)

    @property
    def spec_text(self) -> str:
        """As `spec_text` gives it."""
        return json.dumps(self.spec, sort_keys=True)

    @property
    def _place(self) -> tuple[Any, ...]:
        return self.kind, self.spec_text, self.arch, self.card, self.capability


def entry_of(
    kernel: KernelPlan, card: Gpu, compiler: str, *, gain: float, figures: Sequence[Figure], date: str
) -> Entry:
    """The entry of a kernel for `keep`."""
    kind, spec, arch, name, capability = _place(kernel, card)
    return Entry(
        slug=kernel.slug,
        kind=kind,
        spec=json.loads(spec),
        arch=arch,
        card=name,
        capability=capability,
        compiler=compiler,
        fagen=__version__,
        tile=dataclasses.asdict(kernel.tile),
        gain=gain,
        figures=tuple(figures),
        date=date,
    )


def plan_here(spec: AttentionSpec, arch: Arch) -> tuple[KernelPlan, ...]:
    """The kernels that `fagen.load` runs for `spec` on the first card of this machine."""
    return plan_for(spec, arch, _first_card)


def plan_for(spec: AttentionSpec, arch: Arch, card: Callable[[], Gpu | None]) -> tuple[KernelPlan, ...]:
    """`plan(spec, arch)`, with the tiles that were tuned on `card()`, which is asked only where there are any.

    An entry whose tile is none, or does not go with the other kernels, is left out with a warning. Where nothing may be
    compiled, tiles count whose kernels are built.
    """
    shipped = plan(spec, arch)
    kept = _all() if env.tuned() else {}
    if not kept:
        return shipped
    where = card()
    if where is None:
        return shipped
    tiles = _tiles(spec, arch, shipped, where, kept)
    if not tiles:
        return shipped
    chosen = plan(spec, arch, tiles)
    if not env.jit():
        from fagen import build  # which a look-up of shipped tiles need not import

        if not build.are_found(chosen):
            return shipped
    return chosen


def problem(kernels: Sequence[KernelPlan]) -> str | None:
    """Why the kernels of a spec cannot be tiled as they are; None where they can."""
    from fagen.arch import ranges  # which a look-up without tuned tiles need not import

    for kernel in kernels:
        found = ranges.problem(kernel.kind, kernel.spec, kernel.arch, kernel.tile, kernel.smem_bytes)
        if found is not None:
            return f"{kernel.kind}: {found}"
    rows = {kernel.kind: kernel.tile.tile_m for kernel in kernels if not isinstance(kernel.tile, LinearTile)}
    for kind in ("bwd", "bwd_dq"):
        if kind in rows and rows["fwd"] % rows[kind]:
            return f"{kind}: its {rows[kind]} query rows do not divide the {rows['fwd']} of the forward"
    return None


def entries() -> tuple[Entry, ...]:
    """All that are kept, whether they count here or not."""
    return tuple(_all().values())


def keep(new: Sequence[Entry]) -> Path:
    """Adds entries to the file, in place of those with the same key, and returns where it is. Raises CacheError."""
    return _change(lambda kept: kept | {entry.key: entry for entry in new})


def forget(drop: Callable[[Entry], bool]) -> list[Entry]:
    """Removes the entries that `drop` takes from the file, and returns them. A file that is damaged, or has no others,
    goes. Raises CacheError."""
    gone: list[Entry] = []

    def left(kept: dict[tuple[Any, ...], Entry]) -> dict[tuple[Any, ...], Entry]:
        gone.extend(entry for entry in kept.values() if drop(entry))
        return {key: entry for key, entry in kept.items() if not drop(entry)}

    if any((root / FILE).exists() for root in cache.search_dirs("cuda")):
        _change(left)
    return gone


def is_current(entry: Entry, compiler: str | None) -> bool:
    """Whether it counts for that compiler and this version of fagen, if the card does."""
    return entry.fagen == __version__ and entry.compiler == compiler


def compiler_identity() -> str | None:
    """Of the compiler of cubins here; None without one."""
    try:
        return toolchain.find_cuda_compiler().identity
    except ToolchainError:
        return None


def _first_card() -> Gpu | None:
    cards = gpus()
    return cards[0] if cards else None


def _place(kernel: KernelPlan, card: Gpu) -> tuple[str, str, str, str, tuple[int, int]]:
    """The part of an entry's key that a kernel and a card are."""
    return kernel.kind, spec_text(kernel.spec), kernel.arch.name, card.name, card.capability


def spec_text(spec: AttentionSpec) -> str:
    """A kernel's spec in the key of an entry: its JSON, without dropout."""
    return json.dumps(spec.model_dump(mode="json") | {"dropout": False}, sort_keys=True)


def _tiles(
    spec: AttentionSpec,
    arch: Arch,
    shipped: Sequence[KernelPlan],
    card: Gpu,
    kept: Mapping[tuple[Any, ...], Entry],
) -> dict[Kind, Tile]:
    """Those of the entries that count for the kernels `shipped`, which are those of `spec` on `arch`."""
    places = {key[:-2] for key in kept}
    named = [(kernel, place) for kernel in shipped if (place := _place(kernel, card)) in places]
    compiler = compiler_identity() if named else None
    tiles: dict[Kind, Tile] = {}
    for kernel, place in named:
        entry = kept.get((*place, compiler, __version__))
        if entry is None:
            continue
        try:
            tile = _tile(entry, kernel)
        except SpecError as error:
            _leave_out(kernel, str(error))
        else:
            tiles |= {} if tile is None else {kernel.kind: tile}
    if not tiles or _problem_with(spec, arch, tiles) is None:
        return tiles
    going: dict[Kind, Tile] = {}  # together, one after the other
    for kernel in shipped:
        if kernel.kind in tiles:
            trial = going | {kernel.kind: tiles[kernel.kind]}
            reason = _problem_with(spec, arch, trial)
            if reason is None:
                going = trial
            else:
                _leave_out(kernel, reason)
    return going


def _problem_with(spec: AttentionSpec, arch: Arch, tiles: Mapping[Kind, Tile]) -> str | None:
    """`problem` of the kernels of a spec that have those tiles, and else the tables'."""
    try:
        return problem(plan(spec, arch, tiles))
    except SpecError as error:  # more shared memory than there is
        return str(error)


def _leave_out(kernel: KernelPlan, reason: str) -> None:
    _warn(f"the tuned tile of {kernel.slug} is not used ({reason}): fagen tune finds another")


def _tile(entry: Entry, shipped: KernelPlan) -> Tile | None:
    """The entry's tile for the kernel `shipped`; None where dropout leaves it with its own. SpecError where the entry
    holds no tile of its family."""
    from fagen.arch import ranges

    own = dataclasses.asdict(shipped.tile)
    if {name: type(value) for name, value in entry.tile.items()} != {name: type(value) for name, value in own.items()}:
        if shipped.spec.dropout:  # without it, the kernel may be of another family
            return None
        raise SpecError(f"a tile has {', '.join(own)}")
    tile = type(shipped.tile)(**entry.tile)  # type: ignore[arg-type]
    return ranges.with_dropout(shipped.tile, tile) if shipped.spec.dropout else tile


def _all() -> dict[tuple[Any, ...], Entry]:
    """Every entry by its key: of the user's own file before those of a cache that others write."""
    others, *own = cache.search_dirs("cuda")
    found: dict[tuple[Any, ...], Entry] = {}
    for root in (others, *reversed(own)):
        found |= _read(root / FILE)
    return found


def _read(file: Path) -> dict[tuple[Any, ...], Entry]:
    """The entries of a file; none where there is no such file, and, with a warning, where it is damaged."""
    try:
        state = file.stat()
    except OSError:
        return {}
    return _parsed(file, state.st_mtime_ns, state.st_size, state.st_ino)


@lru_cache(maxsize=4)
def _parsed(file: Path, _mtime: int, _size: int, _inode: int) -> dict[tuple[Any, ...], Entry]:
    try:
        document = json.loads(file.read_bytes())
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r}, not {_FORMAT}")
        return {entry.key: entry for entry in map(_entry, document["entries"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    _warn(f"{file} is damaged ({reason}) and is not used: fagen tune --forget removes it")
    return {}


def _entry(fields: Any) -> Entry:
    """An entry from JSON. Raises ValueError, KeyError or TypeError where it is none."""
    figures = tuple(Figure(**figure) for figure in fields["figures"])
    entry = Entry(**{**fields, "capability": tuple(fields["capability"]), "figures": figures})
    texts = (entry.slug, entry.kind, entry.arch, entry.card, entry.compiler, entry.fagen, entry.date)
    numbers = (entry.gain, *entry.capability, *entry.tile.values()) if isinstance(entry.tile, dict) else (None,)
    if not (
        all(isinstance(text, str) for text in texts)
        and all(isinstance(number, int | float) for number in numbers)
        and isinstance(entry.spec, dict)
    ):
        raise ValueError(f"no entry: {fields}")
    return entry


def _change(change: Callable[[dict[tuple[Any, ...], Entry]], Mapping[tuple[Any, ...], Entry]]) -> Path:
    """Replaces the file by one with other entries, in one step, while nobody else does."""
    root = cache.build_dir("cuda")
    file = root / FILE
    try:
        with cache.lock(root, FILE):
            kept = change(dict(_read(file)))
            if not kept:
                file.unlink(missing_ok=True)
                return file
            document = {"format": _FORMAT, "entries": [dataclasses.asdict(entry) for entry in kept.values()]}
            with replacing(file) as new:
                new.write(f"{json.dumps(document, indent=2)}\n".encode())
    except OSError as error:
        raise CacheError(
            f"{file}: {error.strerror}: no tile can be kept there. Set FAGEN_CACHE_DIR to a directory of your own"
        ) from error
    return file


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
