# Before
import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 64, 7, padding=3), nn.SiLU(), nn.Conv2d(64, 3, 3, padding=1)).to("cuda")
for x, y in loader:
    loss = F.mse_loss(model(x), y)
# After
import torch
from torch import nn
from flatout import pad_few_channels

model = nn.Sequential(nn.Conv2d(3, 64, 7, padding=3), nn.SiLU(), nn.Conv2d(64, 3, 3, padding=1)).to("cuda")
pad_few_channels(model)
for x, y in loader:
    loss = F.mse_loss(model(x), y)
