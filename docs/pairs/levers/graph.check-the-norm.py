# Before
loss.backward()
for name, p in model.named_parameters():
    if torch.isnan(p.grad).any() or torch.isinf(p.grad).any():
        raise FloatingPointError(name)
optimizer.step()
# After
loss.backward()
if not torch.isfinite(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])):
    for name, p in model.named_parameters():
        if torch.isnan(p.grad).any() or torch.isinf(p.grad).any():
            raise FloatingPointError(name)
optimizer.step()
