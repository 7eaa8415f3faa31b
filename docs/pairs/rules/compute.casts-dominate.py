# Before
def forward(self, x):
    x = self.norm1(x.float()).to(torch.bfloat16)
    x = F.relu(x.float()).to(torch.bfloat16)
    return self.norm2(x.float()).to(torch.bfloat16)


# After
def forward(self, x):
    x = self.norm1(x.float())
    x = F.relu(x)
    return self.norm2(x).to(torch.bfloat16)
