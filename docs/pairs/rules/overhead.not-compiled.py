# Before
model = Transformer()
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
model = torch.compile(Transformer())
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
