# Before
def discounted(rewards):
    values = rewards.cpu().numpy()
    values = np.clip(values, -1.0, 1.0)
    values = np.cumsum(values[::-1])[::-1].copy()
    return torch.from_numpy(values).to(rewards.device)


# After
def discounted(rewards):
    values = rewards.clamp(-1.0, 1.0)
    return values.flip(0).cumsum(0).flip(0)
