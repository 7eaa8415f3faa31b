# Before
model = torch.compile(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2)))
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 2))
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
