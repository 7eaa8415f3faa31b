# Before
import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 384, 1)).to("cuda")
for x, y in loader:
    loss = F.mse_loss(model(x), y)
# After
import torch
from torch import nn
from flatout import pointwise_convolutions_as_products

model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 384, 1)).to("cuda")
pointwise_convolutions_as_products(model)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
