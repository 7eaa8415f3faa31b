# Before
backbone = {"params": model.backbone.parameters(), "lr": 0.0}
head = {"params": model.head.parameters(), "lr": 1e-3}
optimizer = torch.optim.AdamW([backbone, head])
train(model, optimizer)
# After
model.backbone.requires_grad_(False)
optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
train(model, optimizer)
