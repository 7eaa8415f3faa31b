# Before
loader = DataLoader(dataset, batch_size=64, shuffle=True)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=4, persistent_workers=True)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
