# Before
a, b = encoder(x), encoder(y)
squares = ((a[:, None] - b[None]) ** 2).sum(-1)
loss = F.cross_entropy(-squares, labels)
# After
a, b = encoder(x), encoder(y)
squares = torch.cdist(a, b).square()
loss = F.cross_entropy(-squares, labels)
