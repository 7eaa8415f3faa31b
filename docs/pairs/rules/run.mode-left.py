# Before
for epoch in range(num_epochs):
    train_epoch(model, loader)
    with torch.no_grad():
        correct = sum((model(x).argmax(-1) == y).sum() for x, y in validation_loader)
# After
for epoch in range(num_epochs):
    model.train()
    train_epoch(model, loader)
    model.eval()
    with torch.no_grad():
        correct = sum((model(x).argmax(-1) == y).sum() for x, y in validation_loader)
