# Before
model = DistributedDataParallel(model)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=100)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
