# Before
@torch.compile
def forward(x):
    h = encoder(x)
    if h.abs().max() > 100:
        h = h / h.abs().max()
    return head(h)


# After
@torch.compile
def forward(x):
    h = encoder(x)
    largest = h.abs().max()
    h = torch.where(largest > 100, h / largest, h)
    return head(h)
