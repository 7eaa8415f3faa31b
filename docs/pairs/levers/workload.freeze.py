# Before
model = Net()
optimizer = torch.optim.AdamW(model.head.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
# After
model = Net()
model.body.requires_grad_(False)
optimizer = torch.optim.AdamW(model.head.parameters())
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
