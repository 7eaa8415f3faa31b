# Before
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer, warm_up_loader)
model.backbone.requires_grad_(False)
train(model, optimizer, loader)
# After
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer, warm_up_loader)
optimizer.zero_grad(set_to_none=True)
model.backbone.requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
train(model, optimizer, loader)
