"""The race detector against the definition, on random programs: a race is reported exactly where there is one."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from emulator import compile_kernel, launch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fagen.emulator import EmulatedKernel
from fagen.errors import LaunchError

READ, WRITE, SYNCWARP, SYNCTHREADS = range(4)
Step = tuple[int, int, int]  # kind, thread (or warp), word

THREADS = st.sampled_from([0, 1, 2, 32, 33, 64])
ACCESS = st.tuples(st.sampled_from([READ, READ, WRITE]), THREADS, st.integers(0, 1))
BARRIER = st.one_of(st.tuples(st.just(SYNCWARP), st.integers(0, 2), st.just(0)), st.just((SYNCTHREADS, 0, 0)))
PROGRAM = st.lists(st.one_of(ACCESS, ACCESS, BARRIER), min_size=1, max_size=14)


def has_race(program: list[Step]) -> bool:
    """Two accesses of one word by different threads, one a write, and no barrier of both in between."""
    accesses = [i for i, step in enumerate(program) if step[0] in (READ, WRITE)]
    for first, second in combinations(accesses, 2):
        (kind, thread, word), (other_kind, other, other_word) = program[first], program[second]
        if word != other_word or thread == other or WRITE not in (kind, other_kind):
            continue
        between = program[first + 1 : second]
        one_warp = thread // 32 == other // 32
        if not any(step[0] == SYNCTHREADS or (one_warp and step[:2] == (SYNCWARP, thread // 32)) for step in between):
            return True
    return False


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernel:
    return EmulatedKernel(compile_kernel("races", tmp_path_factory.mktemp("emulator") / "races"), "races")


@settings(max_examples=300, deadline=None)
@given(program=PROGRAM, seed=st.integers(0, 3))
@example(program=[(READ, 0, 0), (READ, 32, 0), (SYNCWARP, 0, 0), (WRITE, 1, 0)], seed=0)
@example(program=[(READ, 0, 0), (READ, 1, 0), (SYNCWARP, 0, 0), (WRITE, 2, 0)], seed=0)
@example(program=[(READ, 0, 0), (SYNCWARP, 0, 0), (READ, 1, 0), (WRITE, 2, 0)], seed=0)
def test_a_race_is_reported_exactly_where_there_is_one(kernel: EmulatedKernel, program: list[Step], seed: int) -> None:
    steps = torch.tensor(program, dtype=torch.float32)
    try:
        launch(kernel, steps, len(program), threads=96, smem_bytes=32, read_only=(0,), seed=seed)
        raced = False
    except LaunchError as error:
        assert " race: " in str(error)
        raced = True
    assert raced == has_race(program)
