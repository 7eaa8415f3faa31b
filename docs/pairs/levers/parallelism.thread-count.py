# Before
import torch

torch.set_num_threads(1)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
import torch

torch.set_num_threads(8)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
