# Before
class Pictures(Dataset):
    def __init__(self, paths):
        self.paths = paths

    def __getitem__(self, i):
        return to_tensor(Image.open(self.paths[i]).convert("RGB"))


# After
class Pictures(Dataset):
    def __init__(self, paths):
        self.pictures = torch.stack([to_tensor(Image.open(p).convert("RGB")) for p in paths])

    def __getitem__(self, i):
        return self.pictures[i]
