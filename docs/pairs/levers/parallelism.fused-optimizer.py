# Before
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
# After
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
