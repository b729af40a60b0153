"""What a model computed, as digests: recorded in execution order, on any device, without changing a bit of it. See README.md."""

from samebits.verify.trace.events import Event, TensorRecord
from samebits.verify.trace.file import Trace, TraceError, read
from samebits.verify.trace.session import Tracing, trace

__all__ = ["Event", "TensorRecord", "Trace", "TraceError", "Tracing", "read", "trace"]
