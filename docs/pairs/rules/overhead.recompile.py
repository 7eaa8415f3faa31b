# Before
model = torch.compile(model, dynamic=False)
for tokens, targets in loader:  # each batch has a width of its own
    loss = F.cross_entropy(model(tokens), targets)
    loss.backward()
# After
model = torch.compile(model, dynamic=True)
for tokens, targets in loader:  # each batch has a width of its own
    loss = F.cross_entropy(model(tokens), targets)
    loss.backward()
