/* Sharing numbers and rows between threads.
 *
 * A PART is a function of some numbers, EVERY one of which it computes; RUN has all of them computed. In CUDA threads
 * share numbers, and a block of them shares EACH number of a row, of which something is said ONCE.
 */

#ifdef __CUDACC__
#define PART(name, type, s) INLINE void name(const type *s, i64 last)
#define BEGIN(type, s)
#define EVERY(i) for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < last; i += gridDim.x * (i64)blockDim.x)
#define EACH(i, n) for (i64 i = threadIdx.x; i < (n); i += blockDim.x)
#define ONCE if (threadIdx.x == 0)
#define ALL_DONE __syncthreads()
#define ANSWER void
#define YES
#define REQUIRE_EACH(i, n, holds) for (i64 i = blockIdx.x; i < (n); i += gridDim.x) if (!(holds)) __trap();
#ifndef SHARED_BY_BLOCK
#define SHARED_BY_BLOCK(name) extern __shared__ double name[]
#endif
#define RUN(name, s, rows, numbers) name(&s, rows)
#else
#define PART(name, type, s) static void name(const void *arguments, i64 first, i64 last)
#define BEGIN(type, s) const type *s = arguments;
#define EVERY(i) for (i64 i = first; i < last; i++)
#define EACH(i, n) for (i64 i = 0; i < (n); i++)
#define ONCE
#define ALL_DONE
#define ANSWER int
#define YES return 1
#define REQUIRE_EACH(i, n, holds) for (i64 i = 0; i < (n); i++) if (!(holds)) return 0;
#define RUN(name, s, rows, numbers) share(name, &s, rows, numbers, threads)

typedef void (*rows_of)(const void *arguments, i64 first, i64 last);
struct share { rows_of body; const void *arguments; i64 rows; };

/* PyTorch's own OpenMP: its GOMP_parallel, omp_get_thread_num and omp_get_num_threads, or none. */
static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*thread_number)(void), (*team_size)(void);
API void use_threads(void *of_parallel, void *of_number, void *of_size) {
    parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))of_parallel;
    thread_number = (int (*)(void))of_number;
    team_size = (int (*)(void))of_size;
}

static void one_share(void *data) {
    const struct share *all = data;
    i64 n = thread_number(), team = team_size(); /* which may be smaller than the team that was asked for */
    all->body(all->arguments, all->rows * n / team, all->rows * (n + 1) / team);
}

static void share(rows_of body, const void *arguments, i64 rows, i64 numbers, unsigned threads) {
    struct share all = {body, arguments, rows};
    if (parallel && threads > 1 && rows > 1 && numbers >= 32768)
        parallel(one_share, &all, threads, 0);
    else
        body(arguments, 0, rows);
}
#endif
