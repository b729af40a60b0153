"""The tests every operator must pass, derived from its declaration. An operator's test file is

    class TestMyOp(Conformance):
        op = "my_op"

plus what is special to it. On a CPU the reference is tested; with a GPU every other backend is, bit for bit against the
reference. Comments name the kind of fault a test looks for (docs/hostile-inputs.md).
"""

from samebits.verify.conformance.base import Target
from samebits.verify.conformance.bits import Bits
from samebits.verify.conformance.gradients import Gradients
from samebits.verify.conformance.layout import Layout
from samebits.verify.conformance.machinery import Machinery
from samebits.verify.conformance.refusals import Refusals
from samebits.verify.conformance.sizes import Sizes


class Conformance(Bits, Layout, Sizes, Refusals, Gradients, Machinery):
    """All of them. ``op`` names the operator."""


__all__ = ["Conformance", "Target"]
