"""The verdict of `fagen watch` on one variant: its kernels built, the calls that the case table has for them made and
judged. Runs in a process of its own, for one verdict."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from fagen import build as builder
from fagen import check, env, inspection, ops, origin, toolchain
from fagen import render as renderer
from fagen.check import Case
from fagen.errors import BuildError, FagenError, LaunchError, SpecError, ToolchainError, first_errors
from fagen.plan import KernelPlan
from fagen.spec import AttentionSpec
from fagen.watch import Error, Job, State, Variant, Verdict, case_table

# Features that change the shapes of a call: one with another set of them is no call of the kernel.
_FORMS = frozenset({"varlen", "paged", "split_kv", "backward"})

# Calls of a verdict: at most, unless the spec itself has more rows; and where few rows have its features, at least. A
# call both ways takes four times as long, so that the latter is the most of those.
_MOST, _ENOUGH = 24, 12

# Elements of o that a row of another spec is given at least, by more heads: chance rules the norm of an error over
# fewer, and what the row has was chosen for its own head dim.
_FEW = 4096

_TIMINGS = 30  # of the call on a GPU whose time is shown


def prepare(variants: Sequence[Variant], emulate: bool) -> None:
    """Does before a verdict what need not be done in it: templates are parsed, compilers identified, the card's context
    made."""
    with suppress(FagenError):  # which the verdict then says
        for kernel in dict.fromkeys(kernel for variant in variants for kernel in variant.kernels):
            for target in get_args(renderer.Target):
                renderer.render(kernel, target)
    for find in (toolchain.find_cuda_compiler, toolchain.find_host_compiler):
        with suppress(FagenError):
            find()
    device = _device(emulate)
    if device.type == "cpu":
        # The reference of such small calls takes one thread a tenth of the time, and the compiler has the other core.
        torch.set_num_threads(1)
    torch.zeros(1, device=device).double().norm().item()


def judge(job: Job, begin: Callable[[str], object]) -> Verdict:
    """Builds, runs and judges. `begin` is called with the name of each call before it is made, and with "" behind the
    last.

    Raises SpecError for a bad setting and ToolchainError where no compiler is there: no template can help that.
    """
    env.emulate_seed(), env.emulate_threads()  # bad values are errors, and not those of a call
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        warnings.showwarning = lambda message, *_: notes.append(str(message))
        verdict = _judge(job, begin, notes)
    return replace(verdict, notes=tuple(dict.fromkeys(notes)))


def _judge(job: Job, begin: Callable[[str], object], notes: list[str]) -> Verdict:
    variant, kernels, device = job.variant, job.variant.kernels, _device(job.emulate)
    emulated = device.type == "cpu"
    name = "CPU (emulated)" if emulated else torch.cuda.get_device_name(device)
    state: State = "right"
    problem, call = "", ""
    judged: list[Error] = []
    made = 0
    seconds: dict[str, float] = {}
    artifacts = []
    with ThreadPoolExecutor(1) as pool:
        # Emulated kernels run while the compiler of the cubins finds out what registers and spills those have.
        cubins = pool.submit(builder.build, kernels)
        try:
            artifacts = builder.build(kernels, emulate=True) if emulated else cubins.result()
            attention = ops.PlannedAttention(variant.spec, kernels, device)  # with the tiles of the tables
            for case in calls(variant.spec, emulated, job.every):
                call = _name(case)
                begin(call)
                judged += _errors(case, call, attention, device)
                made += 1
            begin("")
            call = ""
            if not emulated:
                seconds = _seconds(variant.spec, attention, device)
            if not all(error.passed for error in judged):
                state = "past the budget"
        except BuildError as error:
            state, problem = "does not compile", _refusal(error, kernels)
        except Exception as error:
            if isinstance(error, SpecError | ToolchainError) and not call:
                raise
            begin("")
            state, problem = "stopped", f"{call}: {_fault(error, kernels)}" if call else _fault(error, kernels)
        try:
            artifacts = cubins.result()
        except BuildError as error:
            state, problem = "does not compile", _refusal(error, kernels)
        except ToolchainError as error:
            if not emulated:
                raise
            notes.append(f"registers and spills are unknown: {error}")
    return Verdict(
        variant=variant,
        state=state,
        problem=problem,
        device=name,
        calls=made,
        errors=_worst_of_each(judged),
        failures=tuple(error for error in judged if not error.passed),
        reports=tuple(inspection.report(*pair, None) for pair in zip(kernels, artifacts, strict=False)),
        seconds=seconds,
    )


def _device(emulate: bool) -> torch.device:
    if emulate or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


# The calls


def calls(spec: AttentionSpec, emulated: bool, every: bool) -> list[Case]:
    """The calls that a verdict is made of, the smallest first: the rows of the case table of this spec; of those with
    its features, and other head dims or type, as many as take about a second emulated; where these are few, some that
    lack fewest of its features. With `every` all rows that have no feature beside its own. And the call of `fagen
    check`."""
    own = frozenset(spec.features)
    levels: dict[int, dict[str, Case]] = {}
    chosen = {case.id: case for case in [check.default_case(spec, emulated)]}
    for row in _table():
        theirs = frozenset(row.spec.features)
        if theirs <= own and theirs & _FORMS == own & _FORMS and not (emulated and row.large):
            case = _as_of(spec, row)
            (chosen if row.spec == spec else levels.setdefault(len(theirs), {}))[case.id] = case
    for shared in sorted(levels, reverse=True):
        rows = sorted(levels[shared].values(), key=_size)
        most = _MOST if shared == len(own) and not spec.backward else _ENOUGH
        room = len(rows) if every else most - len(chosen)
        chosen |= {case.id: case for case in _spread(rows, room)}
    return sorted(chosen.values(), key=_size)


def _spread(rows: Sequence[Case], count: int) -> list[Case]:
    """`count` of the rows, evenly, the last among them."""
    count = max(0, min(count, len(rows)))
    return [rows[(i + 1) * len(rows) // count - 1] for i in range(count)]


def _as_of(spec: AttentionSpec, row: Case) -> Case:
    """The call of `row`, made of the kernel of `spec`."""
    elements = row.batch * row.heads * row.seqlen_q * spec.dim_v
    if row.spec == spec or not elements:
        return replace(row, spec=spec)
    times = -(-_FEW // elements)
    return replace(row, spec=spec, heads=row.heads * times, heads_k=row.heads_k * times)


def _size(case: Case) -> int:
    return case.batch * case.heads * case.seqlen_q * case.seqlen_k


def _name(case: Case) -> str:
    return case.id.removeprefix(f"{case.spec.slug}-")


def _table() -> list[Case]:
    """Rows of the table in the checkout; none where fagen is installed."""
    path = case_table()
    if path is None:
        return []
    module_spec = importlib.util.spec_from_file_location("fagen_case_table", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        return [*module.CASES, *module.GRADIENTS]
    except Exception as error:  # somebody is editing it
        raise FagenError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _errors(case: Case, name: str, attention: ops.Attention, device: torch.device) -> Iterator[Error]:
    for result, found in check.judge(case, attention, device).items():
        yield Error(
            result=result,
            call=name,
            error=found.error,
            budget=found.budget,
            ratio=check.badness(found),
            passed=found.passed,
            worst="" if found.worst is None else check.place(result, found.worst),
        )


def _worst_of_each(judged: Sequence[Error]) -> dict[str, Error]:
    worst: dict[str, Error] = {}
    for error in judged:
        if error.result not in worst or error.ratio > worst[error.result].ratio:
            worst[error.result] = error
    return worst


def _seconds(spec: AttentionSpec, attention: ops.Attention, device: torch.device) -> dict[str, float]:
    """Of a call large enough to fill a card, and of its gradients."""
    if spec.split_kv:
        case = Case(spec=spec, batch=16, heads=32, heads_k=8, seqlen_q=1, seqlen_k=16384)
    else:
        heads = max(1, 2048 // spec.head_dim)
        case = Case(spec=spec, batch=4, heads=heads, heads_k=heads, seqlen_q=4096, seqlen_k=4096)
    inputs = case.inputs(device, drawn_there=True)
    found = {
        "time": check.seconds_on_gpu(lambda: attention(inputs.q, inputs.k, inputs.v, **inputs.call), _TIMINGS),
    }
    if spec.backward:
        found["time of gradients"] = check.seconds_of_gradients(case, attention, inputs)
    return found


# What went wrong, in terms of the templates


def _refusal(error: BuildError, kernels: Sequence[KernelPlan]) -> str:
    """What a compiler says."""
    if error.source is None:
        return str(error)
    said = origin.locate(first_errors(error.log), _origin(error.source, kernels))
    return "\n".join([error.reason, *(f"  {line}" for line in said.splitlines()), f"source kept: {error.source}"])


def _fault(error: Exception, kernels: Sequence[KernelPlan]) -> str:
    """What the emulator, a card or anything else says."""
    if not isinstance(error, FagenError):
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    source = re.search(r"^  in (.+)$", str(error), re.MULTILINE)
    if not isinstance(error, LaunchError) or source is None:
        return str(error)
    return origin.locate(str(error), _origin(Path(source[1]), kernels))


def _origin(source: Path, kernels: Sequence[KernelPlan]) -> Sequence[origin.Line]:
    """The lines of the file at `source`, which is one of these kernels; none where it is of none any more."""
    with suppress(OSError, FagenError):
        text = source.read_text(encoding="utf-8")
        target: renderer.Target = "emulate" if source.suffix == ".cpp" else "cuda"
        for kernel in kernels:
            if renderer.render(kernel, target) == text:
                return origin.lines(kernel, target)
    return ()
