# Before
h = transformer(tokens)
weight = embedding.weight.t().contiguous()
logits = h @ weight
loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
# After
h = transformer(tokens)
logits = h @ embedding.weight.t()
loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
