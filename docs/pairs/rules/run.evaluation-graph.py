# Before
model.eval()
correct = 0
for x, y in validation_loader:
    correct += (model(x).argmax(-1) == y).sum()
# After
model.eval()
correct = 0
with torch.no_grad():
    for x, y in validation_loader:
        correct += (model(x).argmax(-1) == y).sum()
