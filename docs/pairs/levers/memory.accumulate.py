# Before
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
# After
for x, y in loader:
    optimizer.zero_grad()
    part_size = -(-len(x) // 4)
    total = 0.0
    for x_part, y_part in zip(x.split(part_size), y.split(part_size), strict=True):
        out = model(x_part)
        loss = F.cross_entropy(out, y_part)
        share = len(x_part) / len(x)
        (loss * share).backward()
        total += loss.detach() * share
    loss = total
    optimizer.step()
