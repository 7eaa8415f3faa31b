"""Attention with a mask that is a structure: which keys each query sees is known before anything is computed."""

from flatout.kernels.attention import masks as masks
from flatout.kernels.attention import scores as scores
