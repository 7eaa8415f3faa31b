# Before
loader = DataLoader(dataset, batch_size=256, pin_memory=True)
for x, y in loader:
    x = x.to("cuda", non_blocking=True)
    y = y.to("cuda", non_blocking=True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
from flatout import Prefetch

loader = DataLoader(dataset, batch_size=256, pin_memory=True)
for x, y in Prefetch(loader, "cuda"):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
