# Before
losses = []
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    losses.append(loss)
print(sum(losses) / len(losses))
# After
losses = []
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    losses.append(loss.detach())
print(sum(losses) / len(losses))
