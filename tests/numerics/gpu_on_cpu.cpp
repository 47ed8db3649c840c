/* Runs the kernels of gpu.cu on a CPU, one thread of a block after the other, from barrier to barrier. */
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __CUDACC__
#define __device__
#define __global__
#define __constant__ const
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define SHARED_BY_BLOCK(name) double *name = shared_by_block

struct place { int x; };
static place threadIdx, blockIdx, blockDim, gridDim;
static double shared_by_block[48 * 1024 / 8];

static ucontext_t scheduler, *running;
static void __syncthreads() { swapcontext(running, &scheduler); }
static void __trap() { abort(); }

template <typename to, typename from> static to same_bits(from x) {
    to y;
    static_assert(sizeof x == sizeof y);
    std::memcpy(&y, &x, sizeof x);
    return y;
}
static long long __double_as_longlong(double x) { return same_bits<long long>(x); }
static double __longlong_as_double(long long b) { return same_bits<double>(b); }
static int __float_as_int(float x) { return same_bits<int>(x); }
static double __dsqrt_rn(double x) { return std::sqrt(x); }
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
template <typename number> static void atomicMax(number *place, number value) {
    if (value > *place) *place = value;
}

#include "gpu.cu"

extern "C" void sgd_at(const updates *all) { sgd(*all); }
extern "C" void bernoulli_at(float *y, const draws *all) { bernoulli(y, *all); }
extern "C" void folded_at(const double *rows, double *y, const moves *m) { folded(rows, y, *m); }
extern "C" void max_pool_at(float *y, const float *x, i64 *places, const pooling *p) { max_pool(y, x, places, *p); }
extern "C" void max_pool_backward_at(float *y, const float *grad, const i64 *places, const pooling *p) {
    max_pool_backward(y, grad, places, *p);
}
extern "C" void adamw_at(const updates *all) { adamw(*all); }

/* Numbers that are no float64 go to integer registers and float64 ones to others, each kind in its own order, so that
 * one call serves every kernel. */
typedef void (*kernel)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, double, double, double, double,
                       double);
static kernel called;
static const i64 *n;
static const double *d;
static std::vector<bool> done;
static void thread() {
    int mine = threadIdx.x;
    called(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], d[0], d[1], d[2], d[3], d[4]);
    done[mine] = true;
}

extern "C" void run(kernel function, int blocks, int threads, const i64 *numbers, const double *doubles) {
    static std::vector<std::vector<char>> stacks;
    stacks.resize(threads, std::vector<char>(1 << 16));
    called = function, n = numbers, d = doubles;
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        std::vector<ucontext_t> contexts(threads);
        done.assign(threads, false);
        for (int i = 0; i < threads; i++) {
            getcontext(&contexts[i]);
            contexts[i].uc_stack.ss_sp = stacks[i].data();
            contexts[i].uc_stack.ss_size = stacks[i].size();
            contexts[i].uc_link = &scheduler;
            makecontext(&contexts[i], thread, 0);
        }
        for (int left = threads; left;) {
            left = 0;
            for (int i = 0; i < threads; i++) {
                if (done[i]) continue;
                threadIdx.x = i, running = &contexts[i];
                swapcontext(&scheduler, running);
                left += !done[i];
            }
        }
    }
}
