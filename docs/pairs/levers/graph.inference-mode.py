# Before
def evaluate(model, loader):
    model.eval()
    correct = sum((model(x).argmax(-1) == y).sum() for x, y in loader)
    return correct / len(loader.dataset)


# After
@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = sum((model(x).argmax(-1) == y).sum() for x, y in loader)
    return correct / len(loader.dataset)
