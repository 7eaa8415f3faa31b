# Before
torch.autograd.set_detect_anomaly(True)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
