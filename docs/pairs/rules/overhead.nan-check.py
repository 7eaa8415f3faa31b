# Before
loss.backward()
for name, p in model.named_parameters():
    if torch.isnan(p.grad).any():
        raise RuntimeError(f"the gradient of {name} is NaN")
optimizer.step()
# After
loss.backward()
if step % 10 == 0:
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if not torch.isfinite(norm):
        raise RuntimeError("a gradient is NaN or infinite")
optimizer.step()
