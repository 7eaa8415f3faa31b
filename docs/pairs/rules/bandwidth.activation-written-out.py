# Before
def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def forward(self, x):
    return self.fc2(gelu(self.fc1(x)))


# After
def forward(self, x):
    x = F.gelu(self.fc1(x), approximate="tanh")
    return self.fc2(x)
