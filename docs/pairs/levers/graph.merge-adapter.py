# Before
def forward(self, x):
    return self.linear(x) + self.scale * self.up(self.down(x))


# After
def forward(self, x):
    return flatout.lora_linear(x, self.linear, self.down, self.up, scale=self.scale)
