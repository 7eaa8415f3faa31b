# Before
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2048, 512))
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
# After
flatout.vectorise_draws()
model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2048, 512))
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
