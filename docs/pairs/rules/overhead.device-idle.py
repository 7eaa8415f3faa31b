# Before
model = SmallTransformer().cuda()
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
model = torch.compile(SmallTransformer().cuda(), mode="reduce-overhead")
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
