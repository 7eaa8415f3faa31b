# Before
for step, (x, y) in enumerate(loader):
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    accuracy = (logits.argmax(dim=1) == y).float().mean()
    if step % 50 == 0:
        print(loss.item(), accuracy.item())
# After
for step, (x, y) in enumerate(loader):
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    if step % 50 == 0:
        accuracy = (logits.argmax(dim=1) == y).float().mean()
        print(loss.item(), accuracy.item())
