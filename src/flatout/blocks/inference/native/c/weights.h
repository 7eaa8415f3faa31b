/* SHA-256 (FIPS 180-4) of what weights.bin holds, and what is checked of the file. */
static uint32_t fo_turned(uint32_t x, int n) { return x >> n | x << (32 - n); }
static void fo_sha256_block(uint32_t *h, const uint8_t *p) {
  static const uint32_t k[64] = {
      0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u,
      0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u,
      0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau,
      0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u,
      0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u,
      0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u,
      0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
      0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u,
  };
  uint32_t w[64], v[8];
  for (int i = 0; i < 16; i++)
    w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
  for (int i = 16; i < 64; i++) {
    uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (fo_turned(a, 7) ^ fo_turned(a, 18) ^ a >> 3) + w[i - 7] + (fo_turned(b, 17) ^ fo_turned(b, 19) ^ b >> 10);
  }
  memcpy(v, h, sizeof v);
  for (int i = 0; i < 64; i++) {
    uint32_t a = v[0], e = v[4];
    uint32_t s = v[7] + (fo_turned(e, 6) ^ fo_turned(e, 11) ^ fo_turned(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + k[i] + w[i];
    uint32_t t = (fo_turned(a, 2) ^ fo_turned(a, 13) ^ fo_turned(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
    memmove(v + 1, v, 7 * sizeof *v);
    v[4] += s;
    v[0] = s + t;
  }
  for (int i = 0; i < 8; i++) h[i] += v[i];
}
static void fo_sha256(const uint8_t *data, uint64_t n, uint8_t *sum) {
  uint32_t h[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au, 0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
  uint8_t last[128] = {0};
  uint64_t at = 0, rest, end;
  for (; at + 64 <= n; at += 64) fo_sha256_block(h, data + at);
  rest = n - at;
  memcpy(last, data + at, rest);
  last[rest] = 0x80;
  end = rest < 56 ? 64 : 128;
  for (int i = 0; i < 8; i++) last[end - 1 - (uint64_t)i] = (uint8_t)(n * 8 >> (8 * i));
  for (uint64_t i = 0; i < end; i += 64) fo_sha256_block(h, last + i);
  for (int i = 0; i < 32; i++) sum[i] = (uint8_t)(h[i / 4] >> (24 - 8 * (i % 4)));
}
FO_SHOWN const void *NAME_LOWER_weights(const void *file, uint64_t bytes);
const void *NAME_LOWER_weights(const void *file, uint64_t bytes) {
  const uint8_t *p = (const uint8_t *)file;
  uint8_t sum[32];
  uint32_t version;
  uint64_t payload;
  if (!file || bytes != 64 + NAME_UPPER_WEIGHTS_BYTES || memcmp(p, "FLATOUTW", 8)) return 0;
  memcpy(&version, p + 8, 4);
  memcpy(&payload, p + 16, 8);
  if (version != 1 || payload != NAME_UPPER_WEIGHTS_BYTES) return 0;
  fo_sha256(p + 64, payload, sum);
  return memcmp(sum, p + 24, 32) ? 0 : p + 64;
}
