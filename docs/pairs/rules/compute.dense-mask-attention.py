# Before
q, k, v = self.qkv(x).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
y = self.proj(out.transpose(1, 2).flatten(2))
# After
q, k, v = self.qkv(x).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
y = self.proj(out.transpose(1, 2).flatten(2))
