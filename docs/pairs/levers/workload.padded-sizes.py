# Before
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(768, 50257, bias=False)

    def forward(self, x):
        return self.head(self.body(x))


# After
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.head = nn.Linear(768, 50257, bias=False)

    def forward(self, x):
        return F.linear(self.body(x), F.pad(self.head.weight, (0, 0, 0, -self.head.out_features % 64)))[
            ..., : self.head.out_features
        ]
