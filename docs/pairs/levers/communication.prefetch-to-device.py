# Before
for x, y in loader:
    x, y = x.to(device), y.to(device)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
from flatout import Prefetch

for x, y in Prefetch(loader, device):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
