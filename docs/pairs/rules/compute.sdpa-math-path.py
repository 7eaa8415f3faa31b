# Before
q, k, v = self.qkv(x).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
dropout_p = 0.1 if self.training else 0.0
out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
# After
q, k, v = self.qkv(x).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
# The CPU has no fused kernel with dropout. Without it the regularisation is another one.
out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
