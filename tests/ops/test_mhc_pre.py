"""``mhc_pre``: everything an operator must do, and what is special to it."""

from samebits.verify.conformance import Conformance


class TestMhcPre(Conformance):
    op = "mhc_pre"
    width = 40
