# Before
net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
for x in DataLoader(dataset, batch_size=2):
    loss = net(x).square().mean()
    loss.backward()
# After
net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU())
for x in DataLoader(dataset, batch_size=2):
    loss = net(x).square().mean()
    loss.backward()
