"""``mhc_pre_norm``: everything an operator must do, and what is special to it."""

from samebits.verify.conformance import Conformance


class TestMhcPreNorm(Conformance):
    op = "mhc_pre_norm"
    width = 40
