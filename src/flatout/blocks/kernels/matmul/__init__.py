"""Products of matrices: the vendor's library, what beats it here and there, and a table of what was measured on this machine."""

from flatout.blocks.kernels.matmul.dispatch import measure_matmul as measure_matmul
from flatout.blocks.kernels.matmul.dispatch import measuring as measuring
from flatout.blocks.kernels.matmul.linear import Linear as Linear
from flatout.blocks.kernels.matmul.packing import Packed as Packed
from flatout.blocks.kernels.matmul.problem import plain_problem as plain_problem
from flatout.blocks.kernels.matmul.product import matmul as matmul
from flatout.blocks.kernels.matmul.product import matmul_selection as matmul_selection
