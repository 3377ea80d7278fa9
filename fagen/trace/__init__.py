"""Where a kernel departs from the definition: the stages of one block of it beside those of the float64 reference.

The kernel runs as it is and once more traced (`fagen/stages.py`); what the traced one wrote down of a block is compared
stage by stage, in the order in which the block goes through them. Bounds are those of rounding, carried along: what the
product in float32 may lose goes into the score, that into P, to which its rounding to 16 bits comes, and so on. The
first stage past its bound is where to look.
"""

from fagen.trace.block import Block
from fagen.trace.parts import Element, Part, Stage
from fagen.trace.run import Trace, trace, trace_case

__all__ = ["Block", "Element", "Part", "Stage", "Trace", "trace", "trace_case"]
