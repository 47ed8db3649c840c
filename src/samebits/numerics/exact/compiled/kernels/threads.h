/* Sharing rows between threads. */

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
