// From the columns of the stacked product to the cache: the epilogue of every late layer of a chunk in one launch.
//
//     K = rotate(k_norm(s z_k + b_k)) g_k        V = (s z_v + b_v) g_v        s = 1 / rms(predicted block input)
//
// (design section 2.1; ridgefill/fused.py is its meaning in torch, `reference.epilogue` in float64.) One warp takes one
// row of one layer. The row scale is given, or is taken from the layer's `rank` columns behind its keys and values:
// d rms^2 = |z_r|^2 + residual. Everything between z and the cache is in float: one rounding, at the end.
// Also here: int8 maps turned into a tile of weights before the product.

// One layer's columns, constants and destination. ridgefill/kernels.py packs it: field for field, 8-byte fields first.
struct SynthLayer {
    const float* key_bias;    // [kv_heads * head_dim] or null
    const float* value_bias;  // the same
    const float* key_norm;    // [head_dim]: the gain of a per-head RMS norm of the keys, or null
    const float* key_gain;    // [kv_heads] or null
    const float* value_gain;  // the same
    const float* cos;         // [batch or 1, rows, rotary_dim]: entry i multiplies element i
    const float* sin;
    const float* scale;  // [batch * rows], or null: from z
    const i64* slots;    // [batch * rows]: where a paged cache keeps each row, negative: nowhere; or null
    void* keys;
    void* values;
    i64 column;              // of its first key in z; values and the scale's columns follow
    i64 table_batch_stride;  // 0: one table for all sequences
    i64 page_stride;         // elements from one page to the next; contiguous: from one sequence to the next
    i64 head_stride;
    i64 row_stride;
    i64 row_offset;  // contiguous: where row 0 goes
    i64 page_rows;   // paged: rows in a page
    int kv_heads;
    int head_dim;
    int rank;
    int rotary_dim;   // 0: no rotation
    int interleaved;  // pairs (2i, 2i + 1) turn together; else (i, i + rotary_dim / 2)
    float residual;
    float hidden_size;
    float eps;
    float norm_eps;
    int padding;
};
static_assert(sizeof(SynthLayer) == 18 * 8 + 10 * 4, "ridgefill/kernels.py packs 184 bytes");

constexpr int SYNTH_WARPS = 4;  // 70 registers: 28 warps on an SM where blocks of 8 warps would leave 24
constexpr int MAX_HEAD_DIM = 512;

template <typename T>
__device__ inline float row_scale(const SynthLayer& layer, const T* z_row, i64 row, int lane) {
    if (layer.scale) return layer.scale[row];
    const T* directions = z_row + layer.column + 2 * layer.kv_heads * layer.head_dim;
    float energy = 0.0f;
    for (int i = lane; i < layer.rank; i += WARP) {
        float value = to_float(directions[i]);
        energy += value * value;
    }
    energy = group_sum(energy, WARP) + layer.residual;
    return 1.0f / sqrtf(energy / layer.hidden_size + layer.eps);
}

// Where the row's head 0 lies in keys and in values, or -1 for a row that a paged cache does not keep.
__device__ inline i64 row_place(const SynthLayer& layer, i64 row, int sequence, int row_in_sequence) {
    if (!layer.slots) {
        return sequence * layer.page_stride + (layer.row_offset + row_in_sequence) * layer.row_stride;
    }
    i64 slot = layer.slots[row];
    if (slot < 0) return -1;
    return slot / layer.page_rows * layer.page_stride + slot % layer.page_rows * layer.row_stride;
}

// V elements of `z * scale + bias`; bias may be null.
template <typename T, int V>
__device__ inline void load_scaled(const T* z, const float* bias, float scale, float (&to)[V]) {
    Pack<T, V> pack = load_pack<V>(z);
#pragma unroll
    for (int j = 0; j < V; ++j) to[j] = to_float(pack.at[j]) * scale;
    if (bias) {
        float added[V];
        load_floats<V>(bias, added);
#pragma unroll
        for (int j = 0; j < V; ++j) to[j] += added[j];
    }
}

template <typename T, int V>
__device__ inline void store_scaled(T* to, const float (&from)[V], float gain) {
    Pack<T, V> pack;
#pragma unroll
    for (int j = 0; j < V; ++j) store(pack.at[j], from[j] * gain);
    store_pack<V>(to, pack);
}

// Turn V elements from `i` of a staged head; `cos` and `sin` are this row's.
template <int V>
__device__ inline void rotate(const float* head, int i, const SynthLayer& layer, const float* cos, const float* sin,
                              float (&x)[V]) {
    int half = layer.rotary_dim / 2;
    float other[V], c[V], s[V];
    if (!layer.interleaved) {
        load_floats<V>(head + (i < half ? i + half : i - half), other);
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j) other[j] = head[(i + j) ^ 1];
    }
    load_floats<V>(cos + i, c);
    load_floats<V>(sin + i, s);
#pragma unroll
    for (int j = 0; j < V; ++j) {
        bool first = layer.interleaved ? (i + j) % 2 == 0 : i < half;
        x[j] = x[j] * c[j] + (first ? -other[j] : other[j]) * s[j];
    }
}

// batch * rows < 2^31. V divides head_dim, rotary_dim and (half style) rotary_dim / 2; V elements of T are 16 bytes, or V is 1.
// Grid: (ceil(batch * rows / SYNTH_WARPS), layers); block: SYNTH_WARPS * WARP.
template <typename T, int V>
__device__ inline void synth_kv(const T* __restrict__ z, i64 z_stride, int batch, int rows,
                                const SynthLayer* __restrict__ layers) {
    alignas(16) __shared__ float staged[SYNTH_WARPS][MAX_HEAD_DIM];
    const SynthLayer& layer = layers[blockIdx.y];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const i64 row = i64(blockIdx.x) * SYNTH_WARPS + warp;
    if (row >= i64(batch) * rows) return;  // a whole warp: nothing below waits for another
    const int sequence = int(row) / rows, row_in_sequence = int(row) % rows;
    const i64 place = row_place(layer, row, sequence, row_in_sequence);
    if (place < 0) return;

    const T* z_row = z + row * z_stride;
    const float scale = row_scale(layer, z_row, row, lane);
    const int head_dim = layer.head_dim, kv_dim = layer.kv_heads * head_dim;
    const i64 table = sequence * layer.table_batch_stride + i64(row_in_sequence) * layer.rotary_dim;

    // `group` lanes take one head, so a warp takes several short heads at once.
    int group = 1;
    while (group < WARP && group * V < head_dim) group *= 2;
    const int heads_at_once = WARP / group, member = lane % group;
    float* head = staged[warp] + lane / group * (group * V);

    for (int first = 0; first < layer.kv_heads; first += heads_at_once) {
        const int h = first + lane / group;
        const bool active = h < layer.kv_heads;  // others still take part in the warp's sums
        const T* z_key = z_row + layer.column + h * head_dim;
        float square = 0.0f;
        if (active) {
            T* values = static_cast<T*>(layer.values) + place + h * layer.head_stride;
            const float gain = layer.value_gain ? layer.value_gain[h] : 1.0f;
            for (int i = member * V; i < head_dim; i += group * V) {
                float key[V], value[V];
                load_scaled<T, V>(z_key + i, layer.key_bias ? layer.key_bias + h * head_dim + i : nullptr, scale, key);
                load_scaled<T, V>(z_key + kv_dim + i, layer.value_bias ? layer.value_bias + h * head_dim + i : nullptr,
                                  scale, value);
                store_scaled<T, V>(values + i, value, gain);
                store_floats<V>(head + i, key);
#pragma unroll
                for (int j = 0; j < V; ++j) square += key[j] * key[j];
            }
        }
        float inverse = 1.0f;
        if (layer.key_norm) {
            square = group_sum(square, group);
            inverse = 1.0f / sqrtf(square / float(head_dim) + layer.norm_eps);
            if (active) {
                for (int i = member * V; i < head_dim; i += group * V) {
                    float key[V], norm[V];
                    load_floats<V>(head + i, key);
                    load_floats<V>(layer.key_norm + i, norm);
#pragma unroll
                    for (int j = 0; j < V; ++j) key[j] *= inverse * norm[j];
                    store_floats<V>(head + i, key);
                }
            }
        }
        __syncwarp();  // an element's partner is staged by another lane
        if (active) {
            T* keys = static_cast<T*>(layer.keys) + place + h * layer.head_stride;
            const float gain = layer.key_gain ? layer.key_gain[h] : 1.0f;
            for (int i = member * V; i < head_dim; i += group * V) {
                float key[V];
                load_floats<V>(head + i, key);
                if (i < layer.rotary_dim) rotate<V>(head, i, layer, layer.cos + table, layer.sin + table, key);
                store_scaled<T, V>(keys + i, key, gain);
            }
        }
        __syncwarp();  // the next heads are staged where these were
    }
}

// Columns [first, first + width) of a map held as int8: code * scale, one bf16 scale for 128 inputs of a column.
// Grid: (ceil(width / (256 V)), n_in) with the second strided; block: 256.
template <typename T, int V>
__device__ inline void dequantise(const signed char* codes, const bf16* scales, i64 n_out, i64 n_in, i64 first,
                                  i64 width, T* out) {
    const i64 column = (i64(blockIdx.x) * blockDim.x + threadIdx.x) * V;
    if (column >= width) return;
    for (i64 row = blockIdx.y; row < n_in; row += gridDim.y) {
        Pack<signed char, V> code = load_pack<V>(codes + row * n_out + first + column);
        Pack<bf16, V> scale = load_pack<V>(scales + row / 128 * n_out + first + column);
        Pack<T, V> value;
#pragma unroll
        for (int j = 0; j < V; ++j) store(value.at[j], float(code.at[j]) * to_float(scale.at[j]));
        store_pack<V>(out + row * width + column, value);
    }
}

#define RIDGEFILL_SYNTH(NAME, T, V)                                                                                 \
    extern "C" __global__ void __launch_bounds__(SYNTH_WARPS* WARP)                                                \
        synth_kv_##NAME(const T* z, i64 z_stride, i64 batch, i64 rows, const SynthLayer* layers) {                  \
        synth_kv<T, V>(z, z_stride, int(batch), int(rows), layers);                                                           \
    }
#define RIDGEFILL_DEQUANTISE(NAME, T, V)                                                                            \
    extern "C" __global__ void __launch_bounds__(256)                                                              \
        dequantise_##NAME(const signed char* codes, const bf16* scales, i64 n_out, i64 n_in, i64 first, i64 width,  \
                          T* out) {                                                                                 \
        dequantise<T, V>(codes, scales, n_out, n_in, first, width, out);                                            \
    }
RIDGEFILL_SYNTH(bf16, bf16, 8)
RIDGEFILL_SYNTH(bf16_any, bf16, 1)
RIDGEFILL_SYNTH(f16, f16, 8)
RIDGEFILL_SYNTH(f16_any, f16, 1)
RIDGEFILL_SYNTH(f32, float, 4)
RIDGEFILL_SYNTH(f32_any, float, 1)
RIDGEFILL_DEQUANTISE(bf16, bf16, 8)
RIDGEFILL_DEQUANTISE(bf16_any, bf16, 1)
RIDGEFILL_DEQUANTISE(f16, f16, 8)
RIDGEFILL_DEQUANTISE(f16_any, f16, 1)
RIDGEFILL_DEQUANTISE(f32, float, 4)
RIDGEFILL_DEQUANTISE(f32_any, float, 1)
