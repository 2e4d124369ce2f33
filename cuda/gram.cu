// Moments on the device: rows about a fixed shift into the operand of a library product, and its result into float64.
//
// The products themselves are GEMMs of the library, fp32-accumulated (ridgefill/device_fit.py); the error bound stands
// there. Nothing here is atomic: equal rows give equal sums, bit for bit.

constexpr int GRAM_THREADS = 128;

// out = round(x - shift), and each column's sum and sum of squares of what was rounded, added to `sums` and `squares`.
// x [rows, n] with rows `x_stride` apart; out the same with `out_stride`. Grid: ceil(n / GRAM_THREADS).
template <typename In, typename Out>
__device__ inline void centre_rows(const In* __restrict__ x, i64 x_stride, i64 rows, i64 n,
                                   const float* __restrict__ shift, Out* __restrict__ out, i64 out_stride,
                                   double* __restrict__ sums, double* __restrict__ squares) {
    const i64 column = i64(blockIdx.x) * GRAM_THREADS + threadIdx.x;
    if (column >= n) return;
    const float moved = shift[column];
    double sum = 0.0, square = 0.0;
#pragma unroll 4
    for (i64 row = 0; row < rows; ++row) {
        Out rounded;
        store(rounded, to_float(x[row * x_stride + column]) - moved);
        out[row * out_stride + column] = rounded;
        const double value = to_float(rounded);
        sum += value;
        square += value * value;
    }
    sums[column] += sum;
    squares[column] += square;
}

// total += part, `count` of them. Grid: any number of blocks, strided; block: 256.
extern "C" __global__ void __launch_bounds__(256)
    add_products(double* __restrict__ total, const float* __restrict__ part, i64 count) {
    const i64 step = i64(gridDim.x) * blockDim.x;
    for (i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) total[i] += double(part[i]);
}

#define RIDGEFILL_CENTRE(NAME, IN, OUT)                                                                             \
    extern "C" __global__ void __launch_bounds__(GRAM_THREADS)                                                     \
        centre_rows_##NAME(const IN* x, i64 x_stride, i64 rows, i64 n, const float* shift, OUT* out,                \
                           i64 out_stride, double* sums, double* squares) {                                         \
        centre_rows<IN, OUT>(x, x_stride, rows, n, shift, out, out_stride, sums, squares);                          \
    }
RIDGEFILL_CENTRE(bf16_bf16, bf16, bf16)
RIDGEFILL_CENTRE(f16_bf16, f16, bf16)
RIDGEFILL_CENTRE(f32_bf16, float, bf16)
RIDGEFILL_CENTRE(bf16_f32, bf16, float)
RIDGEFILL_CENTRE(f16_f32, f16, float)
RIDGEFILL_CENTRE(f32_f32, float, float)
