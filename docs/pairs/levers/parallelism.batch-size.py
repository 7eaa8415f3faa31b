# Before
loader = DataLoader(dataset, batch_size=32, shuffle=True)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
loader = DataLoader(dataset, batch_size=128, shuffle=True)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
