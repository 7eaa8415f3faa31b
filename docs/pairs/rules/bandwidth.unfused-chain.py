# Before
def forward(self, x):
    variance = x.pow(2).mean(-1, keepdim=True)
    x = x * torch.rsqrt(variance + self.eps)
    return self.proj(x * self.weight)


# After
def forward(self, x):
    x = F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
    return self.proj(x)
