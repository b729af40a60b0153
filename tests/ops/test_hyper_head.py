"""``hyper_head``: everything an operator must do, and what is special to it."""

from samebits.verify.conformance import Conformance


class TestHyperHead(Conformance):
    op = "hyper_head"
    width = 40
