# Before
@torch.compile(mode="reduce-overhead")
def step(x, mean):
    h = encoder(x)
    mean.lerp_(h.detach().mean(0), 0.1)  # writes to an input
    return head(h - mean)


# After
@torch.compile(mode="reduce-overhead")
def step(x, mean):
    h = encoder(x)
    mean = mean.lerp(h.detach().mean(0), 0.1)
    return head(h - mean), mean
