# Before
for batch in global_batches:  # lists of texts of very different lengths
    mine = batch[rank::world_size]
    loss = model(pad_sequence(mine, batch_first=True))
    loss.backward()
    optimizer.step()
# After
for batch in global_batches:
    shares = [[] for _ in range(world_size)]
    for text in sorted(batch, key=len, reverse=True):
        min(shares, key=lambda share: sum(map(len, share))).append(text)
    loss = model(pad_sequence(shares[rank], batch_first=True))
    loss.backward()
    optimizer.step()
