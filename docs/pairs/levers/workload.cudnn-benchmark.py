# Before
import torch

model = ResNet().to("cuda")
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
# After
import torch

torch.backends.cudnn.benchmark = True

model = ResNet().to("cuda")
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
