# Before
model = DistributedDataParallel(model, find_unused_parameters=True)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
model = DistributedDataParallel(model)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
