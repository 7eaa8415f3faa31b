# Before
for step in range(num_steps):
    for micro_step in range(parts):
        x, y = get_batch()
        loss = F.cross_entropy(model(x), y) / parts
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
# After
for step in range(num_steps):
    if parts % 2:
        raise ValueError("2 micro-batches go through the model at a time, and their number is no multiple of that")
    for micro_step in range(1, parts, 2):
        micro_batches = []
        for part in range(2):
            x, y = get_batch()
            micro_batches.append((x, y))
        x_joined, y_joined = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
        loss = F.cross_entropy(model(x_joined), y_joined) / parts
        (loss * 2).backward()
    optimizer.step()
    optimizer.zero_grad()
