# Before
loader = DataLoader(dataset, batch_size=16, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
# After
loader = DataLoader(dataset, batch_size=128, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
