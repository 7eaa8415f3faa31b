# Before
model = DistributedDataParallel(model)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y) / 4
    loss.backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
# After
model = DistributedDataParallel(model)
for i, (x, y) in enumerate(loader):
    with nullcontext() if i % 4 == 3 else model.no_sync():
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
    if i % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
