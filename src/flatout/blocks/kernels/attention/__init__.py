"""Attention with a mask that is a structure: which keys each query sees is known before anything is computed."""

from flatout.blocks.kernels.attention import masks as masks
from flatout.blocks.kernels.attention import scores as scores
