# Before
model = Transformer()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
model = Transformer()
model.compile()
optimizer = torch.optim.AdamW(model.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
