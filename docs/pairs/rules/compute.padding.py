# Before
def collate(texts):
    x = torch.full((len(texts), 512), pad_id)
    for i, tokens in enumerate(texts):
        x[i, : len(tokens)] = torch.tensor(tokens)
    return x


# After
def collate(texts):
    longest = max(len(tokens) for tokens in texts)
    x = torch.full((len(texts), min(512, -(-longest // 32) * 32)), pad_id)
    for i, tokens in enumerate(texts):
        x[i, : len(tokens)] = torch.tensor(tokens)
    return x
