"""What a kernel's name shows. Names are the vendor libraries' own and guarantee nothing: what they do not show is None."""

from __future__ import annotations

import re
from typing import Final, Literal

from flatout.check.traces.events import WorkKind

CopyDirection = Literal["host-to-device", "device-to-host", "device-to-device"]
CopyMemory = Literal["pageable", "pinned", "device", "unknown"]

_MATRIX: Final = re.compile(
    r"tensorop|hmma|imma|wgmma|gmma|xmma|nvjet|s16816|s1688|s884|h16816|h1688|h884|i16832|tensor16|"
    r"16816gemm|1688gemm|884gemm|884cudnn|1688cudnn|_s\d+x\d+x\d+gemm|flash_(?:fwd|bwd)|FlashAttn|fmha_.*(?:f16|bf16)|"
    r"sm(?:80|90|100)_.*(?:flash|sdpa)|Cijk_.*MI\d",
    re.IGNORECASE,
)
"""Tensor-core instructions (HMMA, IMMA, WGMMA and their shapes: 16x8x16, 16x8x8, 8x8x4) in names of cuBLAS, cuDNN, CUTLASS and
FlashAttention; 'nvjet' is cuBLASLt from CUDA 12.8 on, always tensor cores; 'Cijk' is Tensile on AMD with its MI instruction."""

_NO_MATRIX: Final = re.compile(
    r"sgemm|dgemm|simt|ffma|gemv|gemmSN|dot_kernel|elementwise|reduce_kernel|softmax|layer_norm|batch_norm|bn_|CatArray|"
    r"embedding|index|gather|scatter|copy|fill|dropout|multi_tensor_apply|nll_loss|triton_(?:poi|red|per)_|distribution|"
    r"im2col|pool|sort|cumsum|Memset",
    re.IGNORECASE,
)
"""Kernels of the ordinary arithmetic units: products in float32 without TF32 ('sgemm', 'simt', 'ffma'), and everything that is
no product. A name that has both ('sgemm_tensorop') is of the matrix units."""

_NCCL: Final = re.compile(
    r"^(?:void )?(?:nccl|rccl|mscclKernel|one_shot_all_reduce|two_shot_all_reduce)", re.IGNORECASE
)
_COLLECTIVES: Final = {
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
    "reduce": "reduce",
}
_HOST_MEMORY: Final[dict[str, CopyMemory]] = {"pageable": "pageable", "pinned": "pinned"}
_COPY: Final = re.compile(r"(?P<from>[HDP])to(?P<to>[HDP])(?: \((?P<source>\w+) -> (?P<target>\w+)\))?")
_ARGUMENTS: Final = re.compile(r"\((?!anonymous)(?:[^()]|\([^()]*\))*\)(?: const)?$")


def uses_matrix_units(name: str) -> bool | None:
    """Whether the kernel runs on tensor or matrix cores, as far as its name shows.

    >>> uses_matrix_units("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off")
    True
    >>> uses_matrix_units("ampere_sgemm_128x64_nn"), uses_matrix_units("mine")
    (False, None)
    """
    if _MATRIX.search(name):
        return True
    return False if _NO_MATRIX.search(name) else None


def kernel_kind(name: str) -> WorkKind:
    """The kind of work: 'collective' for kernels of NCCL and its like, else 'kernel'."""
    return "collective" if _NCCL.match(name) else "kernel"


def collective_of(name: str) -> str:
    """The collective that a kernel's name contains: 'all_reduce'; 'unknown' when it has none.

    >>> collective_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'all_reduce'
    """
    plain = name.lower().replace("_", "")
    return next((op for key, op in _COLLECTIVES.items() if key in plain), "unknown")


def copy_of(name: str) -> tuple[CopyDirection, CopyMemory]:
    """Direction, and the kind of host memory, of a copy by its name.

    >>> copy_of("Memcpy HtoD (Pageable -> Device)")
    ('host-to-device', 'pageable')
    """
    found = _COPY.search(name)
    if found is None:
        return "device-to-device", "unknown"
    ends = found["from"], found["to"]
    if ends == ("H", "D"):
        return "host-to-device", _memory(found["source"])
    if ends == ("D", "H"):
        return "device-to-host", _memory(found["target"])
    return "device-to-device", "device"


def short_kernel_name(name: str) -> str:
    """A kernel's name without its argument list, at most 160 characters.

    >>> short_kernel_name("void at::native::vectorized_elementwise_kernel<4, F>(int, F)")
    'at::native::vectorized_elementwise_kernel<4, F>'
    """
    return _ARGUMENTS.sub("", name).removeprefix("void ")[:160]


def _memory(word: str | None) -> CopyMemory:
    return _HOST_MEMORY.get((word or "").lower(), "unknown")
