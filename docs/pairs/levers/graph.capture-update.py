# Before
for x, y in loader:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
# After
from flatout import captured_update


@captured_update(optimizer)
def update(x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


for x, y in loader:
    loss = update(x, y)
    losses.append(loss.item())
