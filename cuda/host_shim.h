// Lets g++ compile the kernels for the CPU, so that tests can run them where no GPU is, under the sanitizers.
//
// A block's threads are fibers of one OS thread, run in turn; a barrier or a shuffle gives the turn away until every
// thread it names has come. A barrier that some thread never reaches ends the process with a message. Blocks run one
// after another, which shared memory (`static` here) relies on. RIDGEFILL_ORDER=reverse runs threads and blocks the
// other way round: a missing barrier shows as another result.
#pragma once
#define RIDGEFILL_HOST 1

#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace shim {

constexpr size_t STACK_BYTES = 128 * 1024;

struct Barrier {
    int arrived = 0;
    long generation = 0;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    void* fake_stack = nullptr;
    bool done = false;
};

struct Block {
    dim3 grid, block, index;
    int threads = 0, current = 0;
    std::function<void()> kernel;
    std::vector<Fiber> fibers;
    ucontext_t scheduler;
    void* scheduler_fake_stack = nullptr;
    const void* scheduler_bottom = nullptr;
    size_t scheduler_bytes = 0;
    Barrier all;
    std::vector<Barrier> warps;
    std::vector<unsigned> exchanged;  // one word a thread, for shuffles
    long progress = 0;
};
inline Block now;

// Give the turn back to the scheduler; `finished`: for good. The sanitizer must know which stack is in use.
inline void yield(bool finished = false) {
    Fiber& fiber = now.fibers[now.current];
    __sanitizer_start_switch_fiber(finished ? nullptr : &fiber.fake_stack, now.scheduler_bottom, now.scheduler_bytes);
    swapcontext(&fiber.context, &now.scheduler);
    __sanitizer_finish_switch_fiber(now.fibers[now.current].fake_stack, nullptr, nullptr);
}

inline void entry() {
    __sanitizer_finish_switch_fiber(nullptr, &now.scheduler_bottom, &now.scheduler_bytes);
    now.kernel();
    now.fibers[now.current].done = true;
    ++now.progress;
    yield(true);
}

inline void wait(Barrier& barrier, int expected) {
    long generation = barrier.generation;
    ++now.progress;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    while (barrier.generation == generation) yield();
}

inline void wait_for_warp() {
    int warp = now.current / 32;
    wait(now.warps[warp], std::min(32, now.threads - 32 * warp));
}

inline void run_block(bool reverse) {
    now.all = Barrier();
    now.warps.assign((now.threads + 31) / 32, Barrier());
    for (Fiber& fiber : now.fibers) {
        fiber.done = false;
        fiber.fake_stack = nullptr;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, entry, 0);
    }
    for (int left = now.threads; left > 0;) {
        long before = now.progress;
        left = 0;
        for (int turn = 0; turn < now.threads; ++turn) {
            now.current = reverse ? now.threads - 1 - turn : turn;
            Fiber& fiber = now.fibers[now.current];
            if (fiber.done) continue;
            __sanitizer_start_switch_fiber(&now.scheduler_fake_stack, fiber.stack.get(), STACK_BYTES);
            swapcontext(&now.scheduler, &fiber.context);
            __sanitizer_finish_switch_fiber(now.scheduler_fake_stack, nullptr, nullptr);
            left += !fiber.done;
        }
        if (left && now.progress == before) {
            std::fprintf(stderr, "host shim: %d threads of block (%u, %u) wait at a barrier that others never reach\n",
                         left, now.index.x, now.index.y);
            std::abort();
        }
    }
}

inline void launch(dim3 grid, dim3 block, std::function<void()> kernel) {
    const char* order = std::getenv("RIDGEFILL_ORDER");
    bool reverse = order && std::strcmp(order, "reverse") == 0;
    now.grid = grid;
    now.block = block;
    now.threads = int(block.x);
    now.kernel = kernel;
    now.exchanged.assign(now.threads, 0);
    now.fibers.resize(now.threads);
    for (Fiber& fiber : now.fibers) {
        if (!fiber.stack) fiber.stack = std::make_unique<char[]>(STACK_BYTES);
    }
    unsigned blocks = grid.x * grid.y;
    for (unsigned turn = 0; turn < blocks; ++turn) {
        unsigned number = reverse ? blocks - 1 - turn : turn;
        now.index = dim3{number % grid.x, number / grid.x, 0};
        run_block(reverse);
    }
}

// A kernel as a C function that runs its whole grid: what a test calls.
template <auto KERNEL>
struct Host;
template <typename... Args, void (*KERNEL)(Args...)>
struct Host<KERNEL> {
    static void run(unsigned grid_x, unsigned grid_y, unsigned block_x, Args... args) {
        launch(dim3{grid_x, grid_y, 1}, dim3{block_x, 1, 1}, [=] { KERNEL(args...); });
    }
};

}  // namespace shim

#define threadIdx (dim3{unsigned(shim::now.current), 0, 0})
#define blockIdx (shim::now.index)
#define blockDim (shim::now.block)
#define gridDim (shim::now.grid)

inline void __syncthreads() { shim::wait(shim::now.all, shim::now.threads); }
inline void __syncwarp(unsigned = 0xffffffffu) { shim::wait_for_warp(); }

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline float __shfl_xor_sync(unsigned, float value, int mask) {
    int thread = shim::now.current, source = (thread & ~31) | ((thread & 31) ^ mask);
    shim::now.exchanged[thread] = __float_as_uint(value);
    shim::wait_for_warp();
    float found = __uint_as_float(shim::now.exchanged[source]);
    shim::wait_for_warp();  // nobody writes again before everybody has read
    return found;
}

// The C++ twins of common.cuh's two PTX conversions (IEEE binary16, to nearest even).
inline float half_to_float(unsigned short bits) {
    unsigned sign = unsigned(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, fraction = bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | (fraction << 13));
    float magnitude = exponent ? std::ldexp(float(fraction + 1024), int(exponent) - 25) : std::ldexp(float(fraction), -24);
    return sign ? -magnitude : magnitude;
}
inline unsigned short float_to_half(float value) {
    unsigned bits = __float_as_uint(value), sign = (bits >> 16) & 0x8000u;
    float magnitude = std::fabs(value);
    if (std::isnan(value)) return static_cast<unsigned short>(sign | 0x7fffu);
    if (magnitude == 0.0f) return static_cast<unsigned short>(sign);
    if (magnitude >= 65520.0f) return static_cast<unsigned short>(sign | 0x7c00u);
    int exponent;
    std::frexp(magnitude, &exponent);  // magnitude = m 2^exponent, m in [1/2, 1)
    int step = std::max(exponent - 11, -24);  // of the grid around it
    unsigned units = unsigned(std::nearbyint(std::ldexp(magnitude, -step)));
    // Units are below 1024 for subnormal numbers, 1024 to 2048 for others, and carry into the exponent by themselves.
    return static_cast<unsigned short>(sign | ((unsigned(step + 24) << 10) + units));
}
