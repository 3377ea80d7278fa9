"""Times one `fagen.load` in a process of its own: `python -m fagen.bench.load SPEC ARCH`, SPEC as JSON.

Prints the seconds from the call to its return, after `import torch` and the making of the spec, as a user's program
would have them. With a GPU the kernel is the card's own, whatever ARCH says. Without one no cubin can be loaded; then
the time is that of what `load` does up to the cubin for ARCH.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> None:
    """Prints the seconds."""
    import torch

    from fagen.arch import resolve
    from fagen.spec import AttentionSpec

    spec, arch = AttentionSpec.model_validate_json(arguments[0]), resolve(arguments[1])
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.zeros(1, device="cuda")  # the context is the program's, not the kernel's
    start = time.perf_counter()
    if on_gpu:
        from fagen.ops import load

        load(spec, emulate=False)
    else:
        from fagen.build import find_or_build
        from fagen.plan import plan

        find_or_build(plan(spec, arch))
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main(sys.argv[1:])
