# Before
import torch

model = Transformer().to("cuda", torch.bfloat16)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
# After
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

attention_order = sdpa_kernel(
    [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ],
    set_priority=True,
)
attention_order.__enter__()

model = Transformer().to("cuda", torch.bfloat16)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
