# Before
class Balls:
    def step(self, push):
        self.speed = self.speed + 0.1 * (push - 9.8)
        self.height = (self.height + 0.1 * self.speed).abs()
        return torch.stack([self.height, self.speed], dim=1)


# After
from flatout import captured


class Balls:
    @captured
    def step(self, push):
        self.speed = self.speed + 0.1 * (push - 9.8)
        self.height = (self.height + 0.1 * self.speed).abs()
        return torch.stack([self.height, self.speed], dim=1)
