# Before
for x, y in loader:
    out = model(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
# After
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(x)
        loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
