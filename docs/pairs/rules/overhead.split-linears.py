# Before
def forward(self, x):
    q = self.q_proj(x)
    k = self.k_proj(x)
    v = self.v_proj(x)
    return self.attend(q, k, v)


# After
def forward(self, x):
    # self.qkv_proj = nn.Linear(width, 3 * width)
    q, k, v = self.qkv_proj(x).split(self.width, dim=-1)
    return self.attend(q, k, v)
