# Before
class Pictures(Dataset):
    def __getitem__(self, i):
        image = self.images[i]
        if random.random() < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn_like(image)


# After
def augment(images):
    is_flipped = torch.rand(len(images), 1, 1, 1) < 0.5
    images = torch.where(is_flipped, images.flip(-1), images)
    return images + 0.1 * torch.randn_like(images)
