// What kernels of one new token's attention do with a head of H = 128 numbers, of which a lane has eight.

constexpr int H = 128;
constexpr float NONE = -1e38f;

__device__ __forceinline__ void widen(float (&to)[8], const Four& from) {
#pragma unroll
    for (int i = 0; i < 4; i++) to[2 * i] = low(from.at[i]), to[2 * i + 1] = high(from.at[i]);
}

__device__ __forceinline__ Four narrowed(const float (&from)[8]) {
    Four result;
#pragma unroll
    for (int i = 0; i < 4; i++) result.at[i] = rounded(from[2 * i], from[2 * i + 1]);
    return result;
}

// This lane's eight numbers of a head, rotated by the angles of the position: those of a half with those of the other.
__device__ __forceinline__ void rotate(float (&result)[8], const Four& mine, const Four& of_other, const float* cosines,
                                       const float* sines, int lane) {
    float here[8], there[8];
    widen(here, mine);
    widen(there, of_other);
    float sign = lane < 8 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int at = lane % 8 * 8 + i;
        result[i] = here[i] * cosines[at] + sign * there[i] * sines[at];
    }
}
