"""Fewer bits, per layer, by measured time and measured sensitivity; a layer that loses stays as it was."""

from flatout.shrink.model_size import stored_bytes
from flatout.shrink.quantise.qat import prepare_qat
from flatout.shrink.quantise.quantised_model import load_quantised, quantise
from flatout.shrink.quantise.selection import QuantisationResult, quantise_where_faster

__all__ = [
    "QuantisationResult",
    "load_quantised",
    "prepare_qat",
    "quantise",
    "quantise_where_faster",
    "stored_bytes",
]
