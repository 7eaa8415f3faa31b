# Before
loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=1)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
loader = DataLoader(dataset, batch_size=64, shuffle=True, num_workers=6, persistent_workers=True)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
