"""What the first call of attention at a new width costs on a GPU, by the kernels that compute it: forward and backward.

    python bench/attention_shapes_device.py

From PyTorch 2.11 on, cuDNN's kernels come first on Hopper and Blackwell. cuDNN builds a plan for each new shape; FlashAttention's
kernels and the memory-efficient ones take any shape at once.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_CUDNN_LAST = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
]
ORDERS = {"default": None, "cuDNN last": _CUDNN_LAST}
WIDTHS = (320, 321, 322, 323, 352, 384)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for is_masked in (True, False):
        for name, order in ORDERS.items():
            with sdpa_kernel(order, set_priority=True) if order else nullcontext():
                for _ in range(2):  # what is loaded once
                    taken_ms(512, is_masked)
                for width in WIDTHS:
                    first = taken_ms(width, is_masked)
                    later = min(taken_ms(width, is_masked) for _ in range(5))
                    said = f"first {first[0]:7.2f} + {first[1]:7.2f} ms, later {later[0]:6.3f} + {later[1]:6.3f} ms"
                    print(f"{'masked' if is_masked else 'no mask':8s} {name:10s} width {width}: {said}", flush=True)


def taken_ms(width: int, is_masked: bool) -> tuple[float, float]:
    """Milliseconds of forward and backward of one call with 32 rows and 12 heads of 64 numbers."""
    q, k, v = (
        torch.randn(32, 12, width, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    mask = torch.randn(32, 1, 1, width, device="cuda", dtype=torch.bfloat16) if is_masked else None
    torch.cuda.synchronize()  # noqa: TID251  # one call is timed from an idle device
    began = time.perf_counter()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.cuda.synchronize()  # noqa: TID251  # one call is timed from an idle device
    middle = time.perf_counter()
    out.sum().backward()
    torch.cuda.synchronize()  # noqa: TID251  # one call is timed from an idle device
    return (middle - began) * 1e3, (time.perf_counter() - middle) * 1e3


if __name__ == "__main__":
    main()
