/* Attention over the paged cache as it lies: of one token each, and of chunks of prompts.
 *
 * D size of a head, Q query heads, K KV heads, G query heads of one KV head.
 */

#include <omp.h>

#include "numbers.h"

/* The largest head, and the most query heads that share a KV head; Python looks before it calls. */
enum { MAX_HEAD_DIM = 256, MAX_GROUP = 16 };
/* Tokens of a context that one piece of work reads: keys and values stay in the second-level cache
 * while all sequences that share them are served. */
enum { CHUNK = 256 };

/* Keys and values of one KV head, and where in them those of a sequence lie. */
typedef struct {
    const bf16 *keys;
    const bf16 *values;
    const int32_t *table;
    int64_t block_size;
} Context;

static Context context_of(const bf16 *cache, int64_t kv_head, int64_t num_kv_heads,
                          int64_t head_size, const int32_t *table, int64_t block_size) {
    const bf16 *keys = cache + kv_head * head_size;
    return (Context){keys, keys + num_kv_heads * head_size, table, block_size};
}

/* Return where a token's key begins among the keys, and its value among the values. */
static inline int64_t place_of(const Context *context, int64_t token, int64_t head_dim) {
    const int64_t block = context->table[token / context->block_size];
    return (block * context->block_size + token % context->block_size) * head_dim;
}

/* Return a * b, in sixteen sums of every sixteenth product; head_dim is a multiple of 32. */
static inline f32x16 products(const bf16 *a, const bf16 *b, int64_t head_dim) {
    f32x16 sums = {0};
#ifdef __AVX512BF16__
    for (int64_t i = 0; i < head_dim; i += 32)
        sums = _mm512_dpbf16_ps(sums, (__m512bh)_mm512_loadu_si512(a + i),
                                (__m512bh)_mm512_loadu_si512(b + i));
#else
    for (int64_t i = 0; i < head_dim; i += 16) sums += load16(a + i) * load16(b + i);
#endif
    return sums;
}

/* The even numbers of each quarter of a, then of b; and the even quarters of a, then of b. */
static const i32x16 EVEN = {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30};
static const i32x16 EVEN_QUARTERS = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};

static inline f32x16 add_neighbours(f32x16 a, f32x16 b) {
    return __builtin_shuffle(a, b, EVEN) + __builtin_shuffle(a, b, EVEN + 1);
}

static inline f32x16 add_neighbour_quarters(f32x16 a, f32x16 b) {
    return __builtin_shuffle(a, b, EVEN_QUARTERS) + __builtin_shuffle(a, b, EVEN_QUARTERS + 4);
}

/* Return the sum of each of four rows, in every quarter a quarter of it. */
static inline f32x16 four_sums(const f32x16 *rows) {
    return add_neighbours(add_neighbours(rows[0], rows[1]), add_neighbours(rows[2], rows[3]));
}

/* Return the sum of each of sixteen rows. */
static inline f32x16 row_sums(const f32x16 *rows) {
    const f32x16 first = add_neighbour_quarters(four_sums(rows), four_sums(rows + 4));
    const f32x16 second = add_neighbour_quarters(four_sums(rows + 8), four_sums(rows + 12));
    return add_neighbour_quarters(first, second);
}

/* What some tokens of a context add to the attention of the query heads of one KV head: for each of
 * these the largest score, the sum of e^(score - largest), and the values weighted by that. */
typedef struct {
    float *largest; /* [G] */
    float *sum;     /* [G] */
    float *values;  /* [G, D] */
} Part;

/* Weight the values of some tokens for `group` heads; known numbers keep the sums in registers. */
static inline __attribute__((always_inline)) void add_values(
    float scores[][CHUNK], const bf16 *const *rows, int64_t num_tokens, const int group,
    const int head_dim, float *out) {
    enum { MOST = 3 };
    f32x16 sums[MOST][MAX_HEAD_DIM / 16];
    const int num_vectors = head_dim / 16;
    for (int g = 0; g < group; g++)
        for (int v = 0; v < num_vectors; v++) sums[g][v] = (f32x16){0};
    for (int64_t token = 0; token < num_tokens; token++)
        for (int v = 0; v < num_vectors; v++) {
            const f32x16 value = load16(rows[token] + 16 * v);
            for (int g = 0; g < group; g++) sums[g][v] += scores[g][token] * value;
        }
    for (int g = 0; g < group; g++) memcpy(out + g * head_dim, sums[g], head_dim * sizeof(float));
}

static inline __attribute__((always_inline)) void attend_part(
    const bf16 *q, int64_t group, const Context *context, int64_t first, int64_t end, float scale,
    const int head_dim, Part part) {
    float scores[MAX_GROUP][CHUNK];
    const bf16 *rows[CHUNK];
    const int64_t num_tokens = end - first;
    int64_t place = 0;
    for (int64_t t = 0; t < num_tokens; t++, place += head_dim) {
        if (t == 0 || (first + t) % context->block_size == 0)
            place = place_of(context, first + t, head_dim);
        rows[t] = context->keys + place;
    }
    for (int64_t t = 0; t < num_tokens; t += 16)
        for (int64_t g = 0; g < group; g++) {
            f32x16 sums[16];
            for (int i = 0; i < 16; i++) {
                /* Behind the last token it is done again, and not looked at. */
                const int64_t token = t + i < num_tokens ? t + i : num_tokens - 1;
                sums[i] = products(q + g * head_dim, rows[token], head_dim);
            }
            const f32x16 of_tile = row_sums(sums) * scale;
            memcpy(scores[g] + t, &of_tile, sizeof of_tile);
        }
    for (int64_t g = 0; g < group; g++) {
        float largest = -INFINITY, sum = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t t = 0; t < num_tokens; t++)
            largest = scores[g][t] > largest ? scores[g][t] : largest;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < num_tokens; t++) {
            float weight = exp_of(scores[g][t] - largest);
            scores[g][t] = weight;
            sum += weight;
        }
        part.largest[g] = largest;
        part.sum[g] = sum;
    }
    for (int64_t t = 0; t < num_tokens; t++) rows[t] += context->values - context->keys;
    int64_t g = 0;
    for (; g + 3 <= group; g += 3)
        add_values(scores + g, rows, num_tokens, 3, head_dim, part.values + g * head_dim);
    if (group - g == 2)
        add_values(scores + g, rows, num_tokens, 2, head_dim, part.values + g * head_dim);
    else if (group - g == 1)
        add_values(scores + g, rows, num_tokens, 1, head_dim, part.values + g * head_dim);
}

/* Join the parts of a context for one query head; they lie `stride` apart. */
static void join_parts(const float *parts, int64_t stride, int64_t num_parts, int64_t g,
                       int64_t group, int64_t head_dim, bf16 *restrict out) {
    float largest = -INFINITY, sum = 0, total[MAX_HEAD_DIM] = {0};
    for (int64_t p = 0; p < num_parts; p++)
        if (parts[p * stride + g] > largest) largest = parts[p * stride + g];
    for (int64_t p = 0; p < num_parts; p++) {
        const float *part = parts + p * stride;
        const float *values = part + 2 * group + g * head_dim;
        const float factor = exp_of(part[g] - largest);
        sum += factor * part[group + g];
#pragma omp simd
        for (int64_t i = 0; i < head_dim; i++) total[i] += factor * values[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < head_dim; i++) out[i] = narrow(total[i] / sum);
}

/* Attention of N sequences that run one token each, over the cache as it lies; each token sees
 * itself and `window` - 1 tokens before it. Contexts are cut into chunks, which every sequence that
 * shares them reads one after the other. scratch has room for N * num_chunks parts of all heads. */
void llmrt_attend_decodes(const bf16 *qkv, const bf16 *cache, const int32_t *tables,
                          const int64_t *ends, const int32_t *group_starts, float *scratch,
                          bf16 *out, int64_t num_sequences, int64_t table_width, int64_t num_heads,
                          int64_t num_kv_heads, int64_t head_dim, int64_t num_slots,
                          int64_t block_size, int64_t num_chunks, int64_t window, float scale) {
    const int64_t row_size = (num_heads + 2 * num_kv_heads) * head_dim;
    const int64_t part_size = head_dim + 2, stride = num_heads * part_size;
    const int64_t num_pieces = num_kv_heads * num_chunks * num_sequences;
#pragma omp parallel if (num_pieces > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t piece = 0; piece < num_pieces; piece++) {
            const int64_t sequence = piece % num_sequences;
            const int64_t chunk = piece / num_sequences % num_chunks;
            const int64_t kv_head = piece / num_sequences / num_chunks;
            const int64_t unseen = ends[sequence] > window ? ends[sequence] - window : 0;
            int64_t first = chunk * CHUNK, end = first + CHUNK;
            if (first < unseen) first = unseen;
            if (end > ends[sequence]) end = ends[sequence];
            if (first >= end) continue;
            const int64_t head = group_starts[kv_head], group = group_starts[kv_head + 1] - head;
            float *numbers = scratch + (sequence * num_chunks + chunk) * stride + head * part_size;
            const Part part = {numbers, numbers + group, numbers + 2 * group};
            const bf16 *q = qkv + sequence * row_size + head * head_dim;
            const Context context = context_of(cache, kv_head, num_kv_heads, num_slots * head_dim,
                                               tables + sequence * table_width, block_size);
            if (head_dim == 64)
                attend_part(q, group, &context, first, end, scale, 64, part);
            else if (head_dim == 128)
                attend_part(q, group, &context, first, end, scale, 128, part);
            else
                attend_part(q, group, &context, first, end, scale, head_dim, part);
        }
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < num_kv_heads * num_sequences; piece++) {
            const int64_t sequence = piece / num_kv_heads, kv_head = piece % num_kv_heads;
            const int64_t head = group_starts[kv_head], group = group_starts[kv_head + 1] - head;
            const int64_t unseen = ends[sequence] > window ? ends[sequence] - window : 0;
            const int64_t chunk = unseen / CHUNK, end = (ends[sequence] + CHUNK - 1) / CHUNK;
            const float *parts =
                scratch + (sequence * num_chunks + chunk) * stride + head * part_size;
            for (int64_t g = 0; g < group; g++)
                join_parts(parts, stride, end - chunk, g, group, head_dim,
                           out + (sequence * num_heads + head + g) * head_dim);
        }
    }
}

/* Rows of queries, (head of a group, token), and keys that one piece of a prompt's work holds at a
 * time: with their scores they fit the first- and second-level caches. */
enum { MAX_ROWS = 96, TILE = 64 };

/* out = left * right, or out += it, for six rows and 16 * num_vectors columns. A row of left holds
 * num_pairs pairs, of which right has one row each. */
static inline __attribute__((always_inline)) void multiply_rows(
    const uint32_t *left, int64_t left_stride, const uint32_t *right, int64_t right_stride,
    int64_t num_pairs, float *out, int64_t out_stride, const int num_vectors, const int adds) {
    f32x16 sums[ROWS_TOGETHER][4];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS_TOGETHER; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++)
            if (adds)
                memcpy(&sums[r][v], out + r * out_stride + 16 * v, sizeof sums[r][v]);
            else
                sums[r][v] = (f32x16){0};
    for (int64_t p = 0; p < num_pairs; p++) {
        u32x16 columns[4];
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++)
            memcpy(&columns[v], right + p * right_stride + 16 * v, sizeof columns[v]);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS_TOGETHER; r++) {
            const u32x16 pair = (u32x16){0} + left[r * left_stride + p];
#pragma GCC unroll 4
            for (int v = 0; v < num_vectors; v++)
                sums[r][v] = add_pairs(sums[r][v], pair, columns[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS_TOGETHER; r++)
#pragma GCC unroll 4
        for (int v = 0; v < num_vectors; v++)
            memcpy(out + r * out_stride + 16 * v, &sums[r][v], sizeof sums[r][v]);
}

/* What a thread needs for the attention of prompts. */
typedef struct {
    uint32_t queries[MAX_ROWS][MAX_HEAD_DIM / 2];
    uint32_t keys[MAX_HEAD_DIM / 2][TILE];   /* pairs along a head, one column for each key */
    uint32_t values[TILE / 2][MAX_HEAD_DIM]; /* pairs of tokens */
    float scores[MAX_ROWS][TILE];
    uint32_t weights[MAX_ROWS][TILE / 2];
    float sums[MAX_ROWS][MAX_HEAD_DIM];
    float largest[MAX_ROWS];
    f32x16 total[MAX_ROWS]; /* in sixteen parts */
} Workspace;

/* Softmax of one row of a tile's scores, of which [from, to) are seen, over all tiles so far. */
static inline void weigh(Workspace *w, int64_t row, int64_t from, int64_t to, float scale,
                         int64_t head_dim) {
    enum { VECTORS = TILE / 16 };
    f32x16 scores[VECTORS];
    memcpy(scores, w->scores[row], sizeof scores);
    if (from > 0 || to < TILE)
        for (int v = 0; v < VECTORS; v++) {
            const i32x16 place = FIRST_SIXTEEN + 16 * v;
            const i32x16 is_seen = (place >= (int32_t)from) & (place < (int32_t)to);
            const f32x16 lowest = (f32x16){0} - INFINITY;
            scores[v] = (f32x16)(((i32x16)scores[v] & is_seen) | ((i32x16)lowest & ~is_seen));
        }
    const f32x16 of_row = larger16(larger16(scores[0], scores[1]), larger16(scores[2], scores[3]));
    const float largest = largest_of(of_row), before = w->largest[row];
    if (largest > before) {
        const float factor = exp_of((before - largest) * scale);
        w->largest[row] = largest;
        w->total[row] *= factor;
#pragma omp simd
        for (int64_t i = 0; i < head_dim; i++) w->sums[row][i] *= factor;
    }
    for (int v = 0; v < VECTORS; v++) {
        const f32x16 weights = exp16((scores[v] - w->largest[row]) * scale);
        store16((bf16 *)w->weights[row] + 16 * v, weights);
        w->total[row] += weights;
    }
}

/* Exchange rows and columns: blocks of 8, then of 4, 2 and 1, across the diagonal. */
#define UPPER(i, width) ((i) & (width) ? 16 + (i) - (width) : (i))
#define LOWER(i, width) ((i) & (width) ? 16 + (i) : (i) + (width))
#define SIXTEEN(f, width)                                                                       \
    ((i32x16){f(0, width), f(1, width), f(2, width), f(3, width), f(4, width), f(5, width),     \
              f(6, width), f(7, width), f(8, width), f(9, width), f(10, width), f(11, width),   \
              f(12, width), f(13, width), f(14, width), f(15, width)})
#define EXCHANGE_BLOCKS(width)                                                                  \
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {                                     \
        if (i & (width)) continue;                                                              \
        const u32x16 upper = rows[i], lower = rows[i + (width)];                                \
        rows[i] = __builtin_shuffle(upper, lower, SIXTEEN(UPPER, width));                       \
        rows[i + (width)] = __builtin_shuffle(upper, lower, SIXTEEN(LOWER, width));             \
    }

static inline void transpose(u32x16 rows[16]) {
    EXCHANGE_BLOCKS(8)
    EXCHANGE_BLOCKS(4)
    EXCHANGE_BLOCKS(2)
    EXCHANGE_BLOCKS(1)
}

/* Take keys and values of the tokens from `first` on, as many as a tile has, or up to `end`. */
static void load_tile(Workspace *w, const Context *context, int64_t first, int64_t end,
                      int64_t head_dim) {
    int64_t places[TILE];
    const int64_t num_tokens = end - first < TILE ? end - first : TILE;
    for (int64_t t = 0; t < num_tokens; t++) places[t] = place_of(context, first + t, head_dim);
    /* Behind the last token stands it again: the weights there are 0. */
    for (int64_t t = num_tokens; t < TILE; t++) places[t] = places[num_tokens - 1];
    for (int64_t t = 0; t < TILE; t += 16)
        for (int64_t pair = 0; pair < head_dim / 2; pair += 16) {
            u32x16 square[16];
            for (int i = 0; i < 16; i++)
                memcpy(&square[i], context->keys + places[t + i] + 2 * pair, sizeof square[i]);
            transpose(square);
            for (int i = 0; i < 16; i++)
                memcpy(&w->keys[pair + i][t], &square[i], sizeof square[i]);
        }
    for (int64_t t = 0; t < TILE; t += 2) {
        const bf16 *restrict even = context->values + places[t];
        const bf16 *restrict odd = context->values + places[t + 1];
        uint32_t *restrict pairs = w->values[t / 2];
#pragma omp simd
        for (int64_t i = 0; i < head_dim; i++) pairs[i] = even[i] | (uint32_t)odd[i] << 16;
    }
}

/* Take the queries of some tokens, head after head, and begin their sums. */
static void begin_rows(Workspace *w, const bf16 *q, int64_t row_size, int64_t group,
                       int64_t num_tokens, int64_t head_dim) {
    const int64_t num_rows = group * num_tokens;
    const int64_t num_padded = (num_rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER * ROWS_TOGETHER;
    for (int64_t row = 0; row < num_padded; row++) {
        if (row < num_rows)
            memcpy(w->queries[row], q + row % num_tokens * row_size + row / num_tokens * head_dim,
                   head_dim * sizeof(bf16));
        else
            memset(w->queries[row], 0, head_dim * sizeof(bf16));
        memset(w->sums[row], 0, head_dim * sizeof(float));
        memset(w->weights[row], 0, sizeof w->weights[row]);
        w->largest[row] = -INFINITY;
        w->total[row] = (f32x16){0};
    }
}

/* Add the tile's values to the sums, as weighted. */
static void add_tile(Workspace *w, int64_t num_rows, int64_t head_dim) {
    for (int64_t row = 0; row < num_rows; row += ROWS_TOGETHER) {
        int64_t column = 0;
        for (; column + 64 <= head_dim; column += 64)
            multiply_rows(w->weights[row], TILE / 2, w->values[0] + column, MAX_HEAD_DIM, TILE / 2,
                          w->sums[row] + column, MAX_HEAD_DIM, 4, 1);
        if (column < head_dim)
            multiply_rows(w->weights[row], TILE / 2, w->values[0] + column, MAX_HEAD_DIM, TILE / 2,
                          w->sums[row] + column, MAX_HEAD_DIM, 2, 1);
    }
}

/* Attention of some tokens of a prompt, for the query heads of one KV head. */
static void attend_rows(Workspace *w, const bf16 *q, int64_t row_size, int64_t group,
                        int64_t num_tokens, const Context *context, int64_t position,
                        int64_t window, int64_t head_dim, float scale, bf16 *out,
                        int64_t out_size) {
    const int64_t num_rows = group * num_tokens;
    const int64_t first_seen = position + 1 > window ? position + 1 - window : 0;
    const int64_t end = position + num_tokens;
    begin_rows(w, q, row_size, group, num_tokens, head_dim);
    for (int64_t first = first_seen / TILE * TILE; first < end; first += TILE) {
        load_tile(w, context, first, end, head_dim);
        for (int64_t row = 0; row < num_rows; row += ROWS_TOGETHER)
            multiply_rows(w->queries[row], MAX_HEAD_DIM / 2, w->keys[0], TILE, head_dim / 2,
                          w->scores[row], TILE, TILE / 16, 0);
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t own = position + row % num_tokens;
            const int64_t from = own + 1 > window ? own + 1 - window - first : 0;
            const int64_t to = own + 1 - first;
            if (to > 0 && from < TILE)
                weigh(w, row, from, to, scale, head_dim);
            else
                memset(w->weights[row], 0, sizeof w->weights[row]);
        }
        add_tile(w, num_rows, head_dim);
    }
    for (int64_t row = 0; row < num_rows; row++) {
        bf16 *restrict out_row = out + row % num_tokens * out_size + row / num_tokens * head_dim;
        float total = 0;
        for (int i = 0; i < 16; i++) total += w->total[row][i];
#pragma omp simd
        for (int64_t i = 0; i < head_dim; i++) out_row[i] = narrow(w->sums[row][i] / total);
    }
}

/* How many pieces a chunk of a prompt is cut into. */
static inline int64_t pieces_of(int64_t length, int64_t step) { return (length + step - 1) / step; }

/* Return the size of a workspace in bytes. */
int64_t llmrt_workspace_size(void) { return sizeof(Workspace); }

/* Attention of N chunks of prompts, over the cache, which holds their own keys and values already.
 * Every token sees itself and `window` - 1 tokens before it. Each thread has a workspace. */
void llmrt_attend_chunks(const bf16 *qkv, const bf16 *cache, const int32_t *tables,
                         const int64_t *rows, const int64_t *starts, const int64_t *lengths,
                         const int32_t *group_starts, void *workspaces, bf16 *out,
                         int64_t num_chunks, int64_t table_width, int64_t num_heads, int64_t num_kv_heads,
                         int64_t head_dim, int64_t num_slots, int64_t block_size, int64_t window,
                         int64_t num_threads, float scale) {
    const int64_t row_size = (num_heads + 2 * num_kv_heads) * head_dim;
    const int64_t out_size = num_heads * head_dim;
    int64_t largest_group = 1, num_pieces = 0;
    for (int64_t k = 0; k < num_kv_heads; k++)
        if (group_starts[k + 1] - group_starts[k] > largest_group)
            largest_group = group_starts[k + 1] - group_starts[k];
    const int64_t step = MAX_ROWS / largest_group;
    for (int64_t i = 0; i < num_chunks; i++)
        num_pieces += pieces_of(lengths[i], step) * num_kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_pieces > 1)
    for (int64_t piece = 0; piece < num_pieces; piece++) {
        const int64_t kv_head = piece % num_kv_heads, head = group_starts[kv_head];
        int64_t chunk = 0, place = piece / num_kv_heads;
        for (; place >= pieces_of(lengths[chunk], step); chunk++)
            place -= pieces_of(lengths[chunk], step);
        const int64_t token = place * step, row = rows[chunk] + token;
        const int64_t rest = lengths[chunk] - token;
        const Context context = context_of(cache, kv_head, num_kv_heads, num_slots * head_dim,
                                           tables + chunk * table_width, block_size);
        attend_rows((Workspace *)workspaces + omp_get_thread_num(),
                    qkv + row * row_size + head * head_dim, row_size,
                    group_starts[kv_head + 1] - head, rest < step ? rest : step, &context,
                    starts[chunk] + token, window, head_dim, scale,
                    out + row * out_size + head * head_dim, out_size);
    }
}
