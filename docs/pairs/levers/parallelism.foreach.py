# Before
with torch.no_grad():
    for average, p in zip(average_model.parameters(), model.parameters()):
        average.mul_(0.999).add_(p, alpha=0.001)
# After
with torch.no_grad():
    averages, parameters = [], []
    for average, p in zip(average_model.parameters(), model.parameters()):
        averages.append(average)
        parameters.append(p)
    torch._foreach_mul_(averages, 0.999)
    torch._foreach_add_(averages, parameters, alpha=0.001)
