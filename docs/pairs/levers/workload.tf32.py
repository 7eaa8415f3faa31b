# Before
import torch

model = Transformer().to("cuda")
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
# After
import torch

torch.set_float32_matmul_precision("high")

model = Transformer().to("cuda")
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
