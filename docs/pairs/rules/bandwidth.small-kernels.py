# Before
def focal_loss(logits, targets):
    p = torch.sigmoid(logits)
    p_t = p * targets + (1 - p) * (1 - targets)
    return (-((1 - p_t) ** 2) * torch.log(p_t)).mean()


# After
@torch.compile
def focal_loss(logits, targets):
    p = torch.sigmoid(logits)
    p_t = p * targets + (1 - p) * (1 - targets)
    return (-((1 - p_t) ** 2) * torch.log(p_t)).mean()
