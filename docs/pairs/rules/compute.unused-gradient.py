# Before
optimizer = torch.optim.AdamW(model.head.parameters())
for x, y in loader:
    loss = F.cross_entropy(model.head(model.backbone(x)), y)
    loss.backward()
    optimizer.step()
# After
model.backbone.requires_grad_(False)
optimizer = torch.optim.AdamW(model.head.parameters())
for x, y in loader:
    loss = F.cross_entropy(model.head(model.backbone(x)), y)
    loss.backward()
    optimizer.step()
