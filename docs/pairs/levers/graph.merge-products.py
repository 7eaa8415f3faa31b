# Before
def forward(self, x):
    q = self.to_q(x)
    k = self.to_k(x)
    v = self.to_v(x)
    return F.scaled_dot_product_attention(q, k, v)


# After
def forward(self, x):
    q, k, v = F.linear(
        x,
        torch.cat([self.to_q.weight, self.to_k.weight, self.to_v.weight]),
        torch.cat([self.to_q.bias, self.to_k.bias, self.to_v.bias]),
    ).chunk(3, dim=-1)
    return F.scaled_dot_product_attention(q, k, v)
