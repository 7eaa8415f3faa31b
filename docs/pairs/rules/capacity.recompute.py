# Before
def forward(self, x):
    for block in self.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return self.head(x)


# After
def forward(self, x):
    for block in self.blocks:
        x = block(x)
    return self.head(x)
