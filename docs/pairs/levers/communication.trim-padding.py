# Before
def collate(rows):
    tokens = torch.full((len(rows), 512), 0)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens


# After
def collate(rows):
    tokens = torch.full((len(rows), min(512, -(-max(len(row) for row in rows) // 32) * 32)), 0)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens
