# Before
def training_step(x, y):
    h = encoder(x)
    reconstruction = decoder(h)
    logits = head(h)
    return F.cross_entropy(logits, y)


# After
def training_step(x, y):
    h = encoder(x)
    logits = head(h)
    return F.cross_entropy(logits, y)
