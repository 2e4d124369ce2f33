// The ridge system from moments about a shift, without a second copy of them: centring, penalty, held-out error.
//
// Factorisation and solves are the library's (cuSOLVER potrf, cuBLAS trsm, float64), called by ridgefill/device_fit.py.
// `columns` names the input columns that take part (features that a set of maps leaves out), or is null for all.

// out [n, n] = xx - rows dx dx^T, and on its diagonal the penalty of the part that a column belongs to.
// xx [., ld] holds sums about the shift, dx = mean - shift. Grid: (ceil(n / 256), n) with the second strided; block: 256.
extern "C" __global__ void __launch_bounds__(256)
    ridge_matrix(double* __restrict__ out, const double* __restrict__ xx, i64 ld, const double* __restrict__ dx,
                 double rows, i64 n, const i64* __restrict__ columns, const double* __restrict__ penalty,
                 i64 part_width) {
    const i64 j = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (j >= n) return;
    const i64 from_j = columns ? columns[j] : j;
    for (i64 i = blockIdx.y; i < n; i += gridDim.y) {
        const i64 from_i = columns ? columns[i] : i;
        double value = xx[from_i * ld + from_j] - rows * dx[from_i] * dx[from_j];
        if (i == j && penalty) value += penalty[i / part_width];
        out[i * n + j] = value;
    }
}

// out [n, width] = columns [first, first + width) of xy - rows dx dy^T. Grid: (ceil(width / 256), n); block: 256.
extern "C" __global__ void __launch_bounds__(256)
    ridge_targets(double* __restrict__ out, const double* __restrict__ xy, i64 ld, const double* __restrict__ dx,
                  const double* __restrict__ dy, double rows, i64 n, const i64* __restrict__ columns, i64 first,
                  i64 width) {
    const i64 j = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (j >= width) return;
    const double mean = dy[first + j];
    for (i64 i = blockIdx.y; i < n; i += gridDim.y) {
        const i64 from_i = columns ? columns[i] : i;
        out[i * width + j] = xy[from_i * ld + first + j] - rows * dx[from_i] * mean;
    }
}

// errors [width] = syy - 2 sum_i w sxy + sum_i w (sxx w) + rows offset^2: the sum over rows of (y - x w - b)^2.
// w, sxx_w and sxy are [n, width]; syy is about the mean, offset = mean y - mean x w - b. Grid: ceil(width / 256).
extern "C" __global__ void __launch_bounds__(256)
    squared_errors(double* __restrict__ errors, const double* __restrict__ w, const double* __restrict__ sxx_w,
                   const double* __restrict__ sxy, const double* __restrict__ syy, const double* __restrict__ offset,
                   double rows, i64 n, i64 width) {
    const i64 j = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (j >= width) return;
    double spread = syy[j];
    for (i64 i = 0; i < n; ++i) spread += w[i * width + j] * (sxx_w[i * width + j] - 2.0 * sxy[i * width + j]);
    errors[j] = (spread > 0.0 ? spread : 0.0) + rows * offset[j] * offset[j];
}
