"""Golden model, wire and register contract. Needs nothing but numpy."""

from neuron_fabric.model.encoding import BINARY, TERNARY, Encoding, encoding_by_name, int_encoding, tally_encoding
from neuron_fabric.model.params import ReducerParams
from neuron_fabric.model.reducer import JobConfig, Outgoing, Parent, SignCountReducer, Straggler
from neuron_fabric.model.wire import Flags, FrameType, Header, HeaderError, Reason
from neuron_fabric.model.worker import BucketFailedError, GoldenWorker

__all__ = [
    "BINARY",
    "TERNARY",
    "BucketFailedError",
    "Encoding",
    "Flags",
    "FrameType",
    "GoldenWorker",
    "Header",
    "HeaderError",
    "JobConfig",
    "Outgoing",
    "Parent",
    "Reason",
    "ReducerParams",
    "SignCountReducer",
    "Straggler",
    "encoding_by_name",
    "int_encoding",
    "tally_encoding",
]
