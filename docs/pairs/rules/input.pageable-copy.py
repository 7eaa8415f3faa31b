# Before
loader = DataLoader(dataset, batch_size=256, num_workers=4)
for x, y in loader:
    x, y = x.to("cuda"), y.to("cuda")
    loss = F.cross_entropy(model(x), y)
# After
loader = DataLoader(dataset, batch_size=256, num_workers=4, pin_memory=True)
for x, y in loader:
    x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
    loss = F.cross_entropy(model(x), y)
