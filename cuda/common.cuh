// What every kernel shares: element types, vector access, warp sums.
//
// Joined in front of a kernel file by ridgefill/kernels.py; it names no header, so NVRTC needs no include folder.
// cuda/host_shim.h, included before it, lets g++ compile the same text for the CPU (RIDGEFILL_HOST).

typedef long long i64;
typedef unsigned short u16;
typedef unsigned int u32;

[[maybe_unused]] constexpr int WARP = 32;
[[maybe_unused]] constexpr u32 ALL_LANES = 0xffffffffu;

// 16-bit floats are their bits: arithmetic is in float, so that a result is rounded once.
struct bf16 {
    u16 bits;
};
struct f16 {
    u16 bits;
};

#ifndef RIDGEFILL_HOST
__device__ inline float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ inline u16 float_to_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(bf16 value) { return __uint_as_float(u32(value.bits) << 16); }
__device__ inline float to_float(f16 value) { return half_to_float(value.bits); }

__device__ inline void store(float& to, float value) { to = value; }
__device__ inline void store(f16& to, float value) { to.bits = float_to_half(value); }
__device__ inline void store(bf16& to, float value) {
    u32 bits = __float_as_uint(value);
    // To nearest, ties to even; a NaN keeps a set bit in what remains of its fraction.
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = u16(nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// V neighbours, moved in one access; the launch has checked that they are aligned to it.
template <typename T, int V>
struct alignas(sizeof(T) * V) Pack {
    T at[V];
};
template <int V, typename T>
__device__ inline Pack<T, V> load_pack(const T* from) {
    return *reinterpret_cast<const Pack<T, V>*>(from);
}
template <int V, typename T>
__device__ inline void store_pack(T* to, const Pack<T, V>& pack) {
    *reinterpret_cast<Pack<T, V>*>(to) = pack;
}

// V floats, at most 4 in one access: 16 bytes are the widest there is.
template <int V>
__device__ inline void load_floats(const float* from, float (&to)[V]) {
    constexpr int STEP = V < 4 ? V : 4;
#pragma unroll
    for (int i = 0; i < V; i += STEP) {
        Pack<float, STEP> part = load_pack<STEP>(from + i);
#pragma unroll
        for (int j = 0; j < STEP; ++j) to[i + j] = part.at[j];
    }
}
template <int V>
__device__ inline void store_floats(float* to, const float (&from)[V]) {
    constexpr int STEP = V < 4 ? V : 4;
#pragma unroll
    for (int i = 0; i < V; i += STEP) {
        Pack<float, STEP> part;
#pragma unroll
        for (int j = 0; j < STEP; ++j) part.at[j] = from[i + j];
        store_pack<STEP>(to + i, part);
    }
}

// The sum over each aligned group of `lanes` lanes (a power of two), in all of them; the whole warp must call it.
__device__ inline float group_sum(float value, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}
