/* Products of factors whose lines are on grids, tile by tile, and their sums over shards. */
#define CACHED (1 << 15) /* numbers that a core keeps beside others */
#define MOST_LINES 16    /* of a tile, tall or wide */
_Static_assert(TALL <= MOST_LINES && 2 * sizeof(few) / sizeof(double) <= MOST_LINES, "a tile has more lines");
static i64 panels_of(i64 lines, i64 tile) { return (lines + tile - 1) / tile; }
static double *panels_for(i64 lines, i64 tile, i64 terms) {
    return malloc((size_t)(panels_of(lines, tile) * tile * terms) * sizeof(double));
}
static i64 part_of(i64 lines, i64 first, i64 tile) { return lines - first < tile ? lines - first : tile; }

/* A shard's factor in panels of as many columns as a tile has. Where the last panel lacks some, its last column stands in
 * for them: zeros would make NaN of infinities, and that the largest number of the total. */
struct snap_panels { const float *x; double *y; i64 rows, width, bits; };
INLINE void snap_panel(const struct snap_panels *s, i64 panel, i64 columns, i64 tile) {
    i64 panels = panels_of(s->width, tile), rows = s->rows, width = s->width;
    const float *x = s->x + panel / panels * rows * width + panel % panels * tile;
    double *y = s->y + panel * rows * tile, shifts[MOST_LINES];
    i32 most[MOST_LINES] = {0};
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
    i64 panels = panels_of(s->width, tile), left = s->width - (panels - 1) * tile;
    for (i64 panel = first; panel < last; panel++)
        if (left == tile || panel % panels < panels - 1)
            snap_panel(s, panel, tile, tile);
        else
            snap_panel(s, panel, left, tile);
}
static void snap_tall_panels(const void *s, i64 first, i64 last) { snap_all_panels(s, first, last, TALL); }
static void snap_wide_panels(const void *s, i64 first, i64 last) { snap_all_panels(s, first, last, ABREAST); }

/* The same of lines that lie densely: numbers of a panel's lines take turns. */
INLINE void snap_panel_of_lines(const struct snap_panels *s, i64 panel, i64 tile) {
    i64 terms = s->rows, first = panel * tile, lines = part_of(s->width, first, tile);
    const float *x[MOST_LINES];
    double *y = s->y + first * terms, shifts[MOST_LINES];
    for (i64 c = 0; c < tile; c++) {
        i32 most = 0;
        x[c] = s->x + (first + (c < lines ? c : lines - 1)) * terms;
        for (i64 k = 0; k < terms; k++) {
            i32 size = size_of(x[c][k]);
            most = size > most ? size : most;
        }
        shifts[c] = shifter((most >> 23) - 126, s->bits);
    }
    for (i64 k = 0; k < terms; k++)
        for (i64 c = 0; c < tile; c++) y[k * tile + c] = (double)x[c][k] + shifts[c] - shifts[c];
}
static void snap_tall_lines(const void *s, i64 first, i64 last) {
    for (i64 panel = first; panel < last; panel++) snap_panel_of_lines(s, panel, TALL);
}
static void snap_wide_lines(const void *s, i64 first, i64 last) {
    for (i64 panel = first; panel < last; panel++) snap_panel_of_lines(s, panel, ABREAST);
}

/* Where the numbers of a tall panel are, of so many terms. */
struct steps { i64 starts[TALL], *steps; };
static struct steps steps_of(i64 terms) {
    struct steps s = {.steps = places(terms)};
    for (i64 i = 0; i < TALL; i++) s.starts[i] = i;
    for (i64 k = 0; k < terms; k++) s.steps[k] = k * TALL;
    return s;
}

/* Tiles of a product, each finished. */
struct product { const double *left, *right; float *y; i64 rows, terms, width; };
static void product_tiles(const void *arguments, i64 first, i64 last) {
    const struct product *p = arguments;
    i64 panels = panels_of(p->rows, TALL), terms = p->terms;
    struct steps at = steps_of(terms);
    double sums[TALL * ABREAST];
    for (i64 tile = first; tile < last; tile++) {
        i64 row = tile % panels * TALL, column = tile / panels * ABREAST;
        i64 tall = part_of(p->rows, row, TALL), wide = part_of(p->width, column, ABREAST);
        tile_of_products(p->left + row * terms, at.starts, at.steps, p->right + column * terms, terms, sums);
        for (i64 i = 0; i < tall; i++) {
            float *restrict y = p->y + (row + i) * p->width + column;
            for (i64 j = 0; j < wide; j++) y[j] = (float)(sums[i * ABREAST + j] + 0.0);
        }
    }
    free(at.steps);
}
API void product_of_lines(const float *x, const float *matrix, float *y, i64 rows, i64 terms, i64 width,
                          i64 is_transposed, i64 bits, unsigned threads) {
    i64 many = TALL * (i64)threads * (1 + 2 * CACHED / (terms * TALL)); /* rows that stay in the caches of all cores */
    many = many < rows ? many : rows;
    double *tall = panels_for(many, TALL, terms), *wide = panels_for(width, ABREAST, terms);
    struct snap_panels rights = {matrix, wide, terms, width, bits};
    share(is_transposed ? snap_wide_panels : snap_wide_lines, &rights, panels_of(width, ABREAST), terms * width, threads);
    for (i64 first = 0; first < rows; first += many) {
        i64 now = part_of(rows, first, many), panels = panels_of(now, TALL);
        struct snap_panels lefts = {x + first * terms, tall, terms, now, bits};
        struct product p = {tall, wide, y + first * width, now, terms, width};
        share(snap_tall_lines, &lefts, panels, now * terms, threads);
        share(product_tiles, &p, panels * panels_of(width, ABREAST), now * width * (1 + terms / 16), threads);
    }
    free(tall), free(wide);
}

API void products_of_columns(const float *left, const float *right, float *y, i64 shards, i64 rows, i64 height, i64 width,
                             i64 bits, unsigned threads) {
    i64 tall_panels = panels_of(height, TALL), wide_panels = panels_of(width, ABREAST);
    double *tall = panels_for(height, TALL, rows), *wide = panels_for(width, ABREAST, rows);
    for (i64 shard = 0; shard < shards; shard++) {
        struct snap_panels lefts = {left + shard * rows * height, tall, rows, height, bits};
        struct snap_panels rights = {right + shard * rows * width, wide, rows, width, bits};
        struct product p = {tall, wide, y + shard * height * width, height, rows, width};
        share(snap_tall_panels, &lefts, tall_panels, rows * height, threads);
        share(snap_wide_panels, &rights, wide_panels, rows * width, threads);
        share(product_tiles, &p, tall_panels * wide_panels, height * width * (1 + rows / 16), threads);
    }
    free(tall), free(wide);
}

/* Tiles of the total: each shard's is finished, rounded to one grid and added. The first shards are set. */
struct add_products {
    const double *left, *right;
    double *total;
    float *largest;
    double shift;
    i64 shards, rows, height, width;
    int is_first;
};
static void add_products_tiles(const void *arguments, i64 first, i64 last) {
    const struct add_products *p = arguments;
    i64 rows = p->rows, tall_panels = panels_of(p->height, TALL), wide_panels = panels_of(p->width, ABREAST);
    struct steps at = steps_of(rows);
    double sums[TALL * ABREAST], shift = p->shift;
    i32 most = 0;
    for (i64 tile = first; tile < last; tile++) {
        i64 row = tile % tall_panels * TALL, column = tile / tall_panels * ABREAST;
        i64 tall = part_of(p->height, row, TALL), wide = part_of(p->width, column, ABREAST);
        double total[TALL * ABREAST] = {0};
        for (i64 shard = 0; shard < p->shards; shard++) {
            const double *left = p->left + (shard * tall_panels * TALL + row) * rows;
            const double *right = p->right + (shard * wide_panels * ABREAST + column) * rows;
            tile_of_products(left, at.starts, at.steps, right, rows, sums);
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
    free(at.steps);
}
API void add_products(const float *left, const float *right, double *total, float *largest, i64 shards, i64 rows,
                      i64 height, i64 width, i64 bits, double shift, unsigned threads) {
    i64 many = CACHED / (rows * (TALL + ABREAST)); /* shards whose parts of a tile stay in the cache */
    many = many < 1 ? 1 : many < shards ? many : shards;
    i64 tall_panels = panels_of(height, TALL), wide_panels = panels_of(width, ABREAST);
    double *tall = panels_for(height, TALL, many * rows), *wide = panels_for(width, ABREAST, many * rows);
    *largest = 0;
    for (i64 first = 0; first < shards; first += many) {
        i64 now = part_of(shards, first, many);
        struct snap_panels lefts = {left + first * rows * height, tall, rows, height, bits};
        struct snap_panels rights = {right + first * rows * width, wide, rows, width, bits};
        struct add_products p = {tall, wide, total, largest, shift, now, rows, height, width, first == 0};
        share(snap_tall_panels, &lefts, now * tall_panels, now * rows * height, threads);
        share(snap_wide_panels, &rights, now * wide_panels, now * rows * width, threads);
        share(add_products_tiles, &p, tall_panels * wide_panels, now * height * width * (1 + rows / 16), threads);
    }
    free(tall), free(wide);
}
