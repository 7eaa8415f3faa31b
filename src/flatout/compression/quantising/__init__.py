"""Fewer bits, per layer, by measured time and measured sensitivity; a layer that loses stays as it was."""

from flatout.compression.quantising.affine import Affine, for_range, per_channel, per_group, per_tensor
from flatout.compression.quantising.choosing import Chosen, choose
from flatout.compression.quantising.observers import Entropy, LeastError, MinMax, Observer, Percentile
from flatout.compression.quantising.qat import Prepared, prepare_qat
from flatout.compression.quantising.quantised import Quantised, load, num_bytes, quantise

__all__ = [
    "Affine",
    "Chosen",
    "Entropy",
    "LeastError",
    "MinMax",
    "Observer",
    "Percentile",
    "Prepared",
    "Quantised",
    "choose",
    "for_range",
    "load",
    "num_bytes",
    "per_channel",
    "per_group",
    "per_tensor",
    "prepare_qat",
    "quantise",
]
