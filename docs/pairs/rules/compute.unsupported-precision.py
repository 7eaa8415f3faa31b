# Before
for x, y in loader:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
