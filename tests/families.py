"""Where a test runs: what `fagen.load` is told."""

from __future__ import annotations

import pytest

# The families of mma.sync and of Hopper, both emulated; and on a GPU its own.
families = pytest.mark.parametrize("arch", ["sm80", "sm90a"])
everywhere = pytest.mark.parametrize("arch", ["sm80", "sm90a", pytest.param("gpu", marks=pytest.mark.gpu)])
