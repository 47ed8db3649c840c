/* Sums over shards of products of factors whose columns are on grids. */
#define CACHED (1 << 15) /* numbers that a core keeps beside others */

/* A shard's factor in panels of as many columns as a tile has. Where the last panel lacks some, its last column stands in
 * for them: zeros would make NaN of infinities, and that the largest number of the total. */
struct snap_panels { const float *x; double *y; i64 rows, width, bits; };
INLINE void snap_panel(const struct snap_panels *s, i64 panel, i64 columns, i64 tile) {
    i64 panels = (s->width + tile - 1) / tile, rows = s->rows, width = s->width;
    const float *x = s->x + panel / panels * rows * width + panel % panels * tile;
    double *y = s->y + panel * rows * tile, shifts[ABREAST];
    i32 most[ABREAST] = {0};
    for (i64 k = 0; k < rows; k++)
        for (i64 c = 0; c < columns; c++) {
            i32 size = size_of(x[k * width + c]);
            most[c] = size > most[c] ? size : most[c];
        }
    for (i64 c = 0; c < columns; c++) shifts[c] = shifter((most[c] >> 23) - 126, s->bits);
    for (i64 k = 0; k < rows; k++) {
        for (i64 c = 0; c < columns; c++) y[k * tile + c] = (double)x[k * width + c] + shifts[c] - shifts[c];
        for (i64 c = columns; c < tile; c++) y[k * tile + c] = y[k * tile + columns - 1];
    }
}
INLINE void snap_all_panels(const struct snap_panels *s, i64 first, i64 last, i64 tile) {
    i64 panels = (s->width + tile - 1) / tile, left = s->width - (panels - 1) * tile;
    for (i64 panel = first; panel < last; panel++)
        if (left == tile || panel % panels < panels - 1)
            snap_panel(s, panel, tile, tile);
        else
            snap_panel(s, panel, left, tile);
}
static void snap_tall_panels(const void *s, i64 first, i64 last) { snap_all_panels(s, first, last, TALL); }
static void snap_wide_panels(const void *s, i64 first, i64 last) { snap_all_panels(s, first, last, ABREAST); }

/* Tiles of the total: each shard's is finished, rounded to one grid and added. The first shards are set. */
struct add_products {
    const double *left, *right;
    double *total;
    float *largest;
    double shift;
    i64 shards, rows, height, width, tall_panels, wide_panels;
    int is_first;
};
static void add_products_tiles(const void *arguments, i64 first, i64 last) {
    const struct add_products *p = arguments;
    i64 starts[TALL], *steps = places(p->rows);
    double sums[TALL * ABREAST], shift = p->shift;
    i32 most = 0;
    for (i64 i = 0; i < TALL; i++) starts[i] = i;
    for (i64 k = 0; k < p->rows; k++) steps[k] = k * TALL;
    for (i64 tile = first; tile < last; tile++) {
        i64 row = tile % p->tall_panels * TALL, column = tile / p->tall_panels * ABREAST;
        i64 tall = p->height - row < TALL ? p->height - row : TALL;
        i64 wide = p->width - column < ABREAST ? p->width - column : ABREAST;
        double total[TALL * ABREAST] = {0};
        for (i64 shard = 0; shard < p->shards; shard++) {
            const double *left = p->left + (shard * p->tall_panels * TALL + row) * p->rows;
            const double *right = p->right + (shard * p->wide_panels * ABREAST + column) * p->rows;
            tile_of_products(left, starts, steps, right, p->rows, sums);
            for (i64 i = 0; i < TALL * ABREAST; i++) {
                float number = (float)(sums[i] + 0.0);
                i32 size = size_of(number);
                most = size > most ? size : most;
                total[i] += (double)number + shift - shift;
            }
        }
        for (i64 i = 0; i < tall; i++) {
            double *y = p->total + (row + i) * p->width + column;
            for (i64 j = 0; j < wide; j++) y[j] = total[i * ABREAST + j] + (p->is_first ? 0.0 : y[j]);
        }
    }
    raise_to(p->largest, most);
    free(steps);
}

API void add_products(const float *left, const float *right, double *total, float *largest, i64 shards, i64 rows,
                      i64 height, i64 width, i64 bits, double shift, unsigned threads) {
    i64 tall_panels = (height + TALL - 1) / TALL, wide_panels = (width + ABREAST - 1) / ABREAST;
    i64 many = CACHED / (rows * (TALL + ABREAST)); /* shards whose parts of a tile stay in the cache */
    many = many < 1 ? 1 : many > shards ? shards : many;
    double *tall = malloc((size_t)(many * rows * tall_panels * TALL) * sizeof(double));
    double *wide = malloc((size_t)(many * rows * wide_panels * ABREAST) * sizeof(double));
    *largest = 0;
    for (i64 first = 0; first < shards; first += many) {
        i64 now = shards - first < many ? shards - first : many;
        struct snap_panels lefts = {left + first * rows * height, tall, rows, height, bits};
        struct snap_panels rights = {right + first * rows * width, wide, rows, width, bits};
        struct add_products p = {tall, wide, total, largest, shift, now, rows, height, width, tall_panels, wide_panels,
                                 first == 0};
        share(snap_tall_panels, &lefts, now * tall_panels, now * rows * height, threads);
        share(snap_wide_panels, &rights, now * wide_panels, now * rows * width, threads);
        share(add_products_tiles, &p, tall_panels * wide_panels, now * height * width, threads);
    }
    free(tall), free(wide);
}
