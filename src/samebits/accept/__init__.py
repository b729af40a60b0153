"""Acceptance of a model's layer: any provider of its operators against the oracle, boundary by boundary, byte by byte."""

from samebits.accept.contract import LayerContract
from samebits.accept.reference import ReferenceProvider
from samebits.accept.report import Report
from samebits.accept.run import accept
from samebits.accept.stub import StubProvider

__all__ = ["LayerContract", "ReferenceProvider", "Report", "StubProvider", "accept"]
