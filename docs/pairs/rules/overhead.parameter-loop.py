# Before
with torch.no_grad():
    for average, p in zip(average_model.parameters(), model.parameters()):
        average.mul_(0.999).add_(p, alpha=0.001)
# After
with torch.no_grad():
    averages, values = list(average_model.parameters()), list(model.parameters())
    torch._foreach_mul_(averages, 0.999)
    torch._foreach_add_(averages, values, alpha=0.001)
