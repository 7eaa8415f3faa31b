# Before
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
# After
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
