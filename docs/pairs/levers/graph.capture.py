# Before
model = Policy().to("cuda")
optimizer = torch.optim.Adam(model.parameters())
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
# After
from flatout import captured

model = Policy().to("cuda")
captured(model)
optimizer = torch.optim.Adam(model.parameters())
for x, y in loader:
    loss = F.mse_loss(model(x), y)
    loss.backward()
