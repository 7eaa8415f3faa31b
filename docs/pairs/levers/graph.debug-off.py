# Before
with torch.autograd.detect_anomaly():
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
# After
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
