# Before
loss = F.cross_entropy(model(x), y)
accuracy = (model(x).argmax(-1) == y).float().mean()
loss.backward()
# After
logits = model(x)
loss = F.cross_entropy(logits, y)
accuracy = (logits.detach().argmax(-1) == y).float().mean()
loss.backward()
