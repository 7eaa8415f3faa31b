# Before
batch_size = 133  # of 128 tokens each: 133 tiles of rows for 132 multiprocessors
loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
# After
batch_size = 132
loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
