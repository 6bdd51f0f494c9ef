/* Rows times a weight matrix: of bfloat16, and of 4- and 8-bit codes. */

#include <omp.h>

#include "numbers.h"

/* Columns of one block of a packed matrix, and the vectors that they fill. */
enum { COLUMNS = 64, COLUMN_VECTORS = COLUMNS / 16 };
/* Which cache memory is fetched into ahead of its use. */
enum { INTO_SECOND_LEVEL = 2 };

/* Where results go: rows of `stride` numbers, rounded to bf16 or whole, as float. */
typedef struct {
    char *start;
    int64_t stride, is_whole;
} Results;

static inline Results results_from(Results out, int64_t row, int64_t column) {
    const int64_t size = out.is_whole ? sizeof(float) : sizeof(bf16);
    return (Results){out.start + (row * out.stride + column) * size, out.stride, out.is_whole};
}

/* Write the first num_columns of some vectors as a row. */
static inline __attribute__((always_inline)) void write_row(Results out, int64_t row,
                                                            const f32x16 *numbers,
                                                            const int num_vectors,
                                                            int64_t num_columns) {
    char *to = results_from(out, row, 0).start;
    if (out.is_whole) {
        memcpy(to, numbers, num_columns * sizeof(float));
        return;
    }
    bf16 rounded[COLUMNS];
#pragma GCC unroll 4
    for (int v = 0; v < num_vectors; v++) store16(rounded + 16 * v, numbers[v]);
    memcpy(to, rounded, num_columns * sizeof(bf16));
}

/* out = x * block + bias for some rows and the columns of one block. Meanwhile, of what comes after
 * it in memory, vectors [first_ahead, end_ahead) of each 64 are fetched. */
static inline __attribute__((always_inline)) void multiply_block(
    const uint32_t *x, const uint32_t *block, const bf16 *bias, int64_t num_pairs, Results out,
    int64_t num_columns, const uint32_t *ahead, int first_ahead, int end_ahead,
    const int num_rows) {
    f32x16 sums[ROWS_TOGETHER][COLUMN_VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < COLUMN_VECTORS; v++) sums[r][v] = (f32x16){0};
    for (int64_t p = 0; p < num_pairs; p++) {
        u32x16 columns[COLUMN_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < COLUMN_VECTORS; v++) {
            memcpy(&columns[v], block + p * COLUMNS + 16 * v, sizeof columns[v]);
            if (v >= first_ahead && v < end_ahead)
                __builtin_prefetch(ahead + p * COLUMNS + 16 * v, 0, INTO_SECOND_LEVEL);
        }
#pragma GCC unroll 6
        for (int r = 0; r < num_rows; r++) {
            const u32x16 pair = (u32x16){0} + x[r * num_pairs + p];
#pragma GCC unroll 4
            for (int v = 0; v < COLUMN_VECTORS; v++)
                sums[r][v] = add_pairs(sums[r][v], pair, columns[v]);
        }
    }
    for (int r = 0; r < num_rows; r++) {
        if (bias)
            for (int v = 0; v < COLUMN_VECTORS; v++) sums[r][v] += load16(bias + 16 * v);
        write_row(out, r, sums[r], COLUMN_VECTORS, num_columns);
    }
}

/* How far ahead of a block's numbers memory is asked for others when the block is read once. */
enum { PAIRS_AHEAD = 16 };
/* Rows that one piece of work takes at most, and from which on they are shared between two. */
enum { ROWS_PER_PIECE = 192, SHARED_FROM = 12 };

/* How many of some rows go together next, at most so many, so that the passes are alike. */
static inline int64_t rows_of_pass(int64_t num_rows, int64_t most) {
    const int64_t num_passes = (num_rows + most - 1) / most;
    return (num_rows + num_passes - 1) / num_passes;
}

/* Into how many parts the rows of a block are cut, each a piece of work. */
static int64_t number_of_parts(int64_t num_rows) {
    if (num_rows < SHARED_FROM) return 1;
    return num_rows <= 2 * ROWS_PER_PIECE ? 2 : (num_rows - 1) / ROWS_PER_PIECE + 1;
}

/* out = x * block + bias for rows [row, end) of num_rows and the columns of one block. */
static void multiply_rows_by_block(const uint32_t *x, const uint32_t *block, const bf16 *bias,
                                   int64_t num_pairs, Results out, int64_t num_columns,
                                   const uint32_t *ahead, int64_t row, int64_t end,
                                   int64_t num_rows) {
    bf16 bias_of_block[COLUMNS];
    if (bias) memcpy(bias_of_block, bias, num_columns * sizeof(bf16));
    const bf16 *b = bias ? bias_of_block : 0;
    while (row < end) {
        const int64_t next = row + rows_of_pass(end - row, ROWS_TOGETHER);
        const uint32_t *x_rows = x + row * num_pairs;
        const Results o = results_from(out, row, 0);
        const int from = COLUMN_VECTORS * row / num_rows, to = COLUMN_VECTORS * next / num_rows;
#define MULTIPLY(n) \
    multiply_block(x_rows, block, b, num_pairs, o, num_columns, ahead, from, to, n)
        switch (next - row) {
        case 1: MULTIPLY(1); break;
        case 2: MULTIPLY(2); break;
        case 3: MULTIPLY(3); break;
        case 4: MULTIPLY(4); break;
        case 5: MULTIPLY(5); break;
        default: MULTIPLY(6);
        }
        row = next;
    }
}

/* out = x * W + bias for a packed matrix: blocks of 64 outputs, in each of them pairs of inputs,
 * [num_outputs / 64][num_inputs / 2][64][2]. `out` is float or bf16. */
void llmrt_multiply_packed(const bf16 *x, const bf16 *packed, const bf16 *bias, void *out,
                           int64_t num_rows, int64_t num_inputs, int64_t num_outputs,
                           int64_t is_whole) {
    const Results all = {out, num_outputs, is_whole};
    const int64_t num_pairs = num_inputs / 2;
    const int64_t num_blocks = (num_outputs + COLUMNS - 1) / COLUMNS;
    const int64_t num_parts = number_of_parts(num_rows);
    /* A block that is read once asks for its own numbers some way ahead; one that is read again,
     * from the cache, for those of the next, a share in each pass. */
    const int64_t pairs_ahead = num_rows <= ROWS_TOGETHER ? PAIRS_AHEAD : num_pairs;
#pragma omp parallel for schedule(static)
    for (int64_t piece = 0; piece < num_blocks * num_parts; piece++) {
        const int64_t first = piece / num_parts * COLUMNS, part = piece % num_parts;
        const uint32_t *block = (const uint32_t *)packed + first * num_pairs;
        multiply_rows_by_block((const uint32_t *)x, block, bias ? bias + first : 0, num_pairs,
                               results_from(all, 0, first),
                               num_outputs - first < COLUMNS ? num_outputs - first : COLUMNS,
                               block + COLUMNS * pairs_ahead, num_rows * part / num_parts,
                               num_rows * (part + 1) / num_parts, num_rows);
    }
}

/* Inputs of a matrix of codes that share a scale, and the pairs that they are. */
enum { GROUP = 32, GROUP_PAIRS = GROUP / 2 };
/* A code of 4 bits stands as the bf16 number 128 + code, which is 0x4300 | code; one of 8 bits,
 * which has a sign, as itself. */
#define CODE_BASE(bits) ((bits) == 4 ? 128.0f : 0.0f)
#define CODE_MIDDLE(bits) ((bits) == 4 ? 8.0f : 0.0f)
/* How far ahead of the words in use memory is asked for others. */
enum { WORDS_AHEAD = 512 };

/* Twelve rows have two sums each, one of them for a group: they fill the registers of AVX-512. */
enum { CODE_ROWS_TOGETHER = 12 };

/* Return a pair of each word's codes, as bf16. Of 4 bits a word holds four pairs, the first inputs
 * in its lower half, the second ones in its upper; of 8 bits two, one byte after the other. */
static inline __attribute__((always_inline)) u32x16 pair_of(u32x16 words, int pair,
                                                            const int bits) {
    if (bits == 4) return ((words >> 4 * pair) & 0x000f000f) | 0x43004300;
    const i32x16 low = (i32x16)(words << (24 - 16 * pair)) >> 24;
    const i32x16 high = (i32x16)(words << (16 - 16 * pair)) >> 24;
    return (u32x16)__builtin_convertvector(low, f32x16) >> 16 |
           (u32x16)__builtin_convertvector(high, f32x16);
}

/* Return where the word of a pair begins, among those of sixteen outputs. */
static inline int64_t word_of(int64_t pair, const int bits) {
    const int pairs_in_word = 16 / bits;
    return pair / pairs_in_word * 16;
}

/* out = x * W + bias for some rows and sixteen columns of a matrix of codes. group_sums are the
 * sums of each row's inputs, by groups. */
static inline __attribute__((always_inline)) void multiply_codes(
    const uint32_t *x, const uint32_t *codes, const bf16 *scales, const float *group_sums,
    const bf16 *bias, int64_t num_groups, Results out, const int num_rows, const int bits) {
    const int pairs_in_word = 16 / bits;
    f32x16 sums[CODE_ROWS_TOGETHER];
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++) sums[r] = bias ? load16(bias) : (f32x16){0};
    for (int64_t group = 0; group < num_groups; group++) {
        f32x16 of_group[CODE_ROWS_TOGETHER];
#pragma GCC unroll 12
        for (int r = 0; r < num_rows; r++) of_group[r] = (f32x16){0};
        const uint32_t *words = codes + word_of(group * GROUP_PAIRS, bits);
        for (int first = 0; first < GROUP_PAIRS; first += pairs_in_word, words += 16) {
            u32x16 all;
            memcpy(&all, words, sizeof all);
            __builtin_prefetch(words + WORDS_AHEAD, 0, INTO_SECOND_LEVEL);
#pragma GCC unroll 4
            for (int p = 0; p < pairs_in_word; p++) {
                const u32x16 columns = pair_of(all, p, bits);
#pragma GCC unroll 12
                for (int r = 0; r < num_rows; r++) {
                    const int64_t pair = (r * num_groups + group) * GROUP_PAIRS + first + p;
                    of_group[r] = add_pairs(of_group[r], (u32x16){0} + x[pair], columns);
                }
            }
        }
        const f32x16 scale = load16(scales + group * 32);
        const f32x16 middle = load16(scales + group * 32 + 16);
#pragma GCC unroll 12
        for (int r = 0; r < num_rows; r++) {
            const float sum = group_sums[r * num_groups + group];
            const float base = (CODE_BASE(bits) + CODE_MIDDLE(bits)) * sum;
            sums[r] += scale * (of_group[r] - base) + middle * sum;
        }
    }
    for (int r = 0; r < num_rows; r++) write_row(out, r, &sums[r], 1, 16);
}

/* Return bits whose upper half is the nearest bf16. */
static inline u32x16 rounded(f32x16 x) {
    const u32x16 bits = (u32x16)x;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

/* Write 64 columns of a matrix of codes as a block of bf16; columns behind the last are 0. */
static inline __attribute__((always_inline)) void decode_block(
    const uint32_t *codes, const bf16 *scales, int64_t num_groups, int64_t num_columns,
    uint32_t *block, const int bits) {
    const int pairs_in_word = 16 / bits;
    for (int64_t column = 0; column < COLUMNS; column += 16)
        for (int64_t group = 0; group < num_groups; group++) {
            const int64_t unit = column / 16 * num_groups + group;
            const int is_there = column < num_columns;
            f32x16 scale = {0}, middle = {0};
            if (is_there) {
                scale = load16(scales + unit * 32);
                middle = load16(scales + unit * 32 + 16);
            }
            const f32x16 base = middle - (CODE_BASE(bits) + CODE_MIDDLE(bits)) * scale;
            for (int64_t p = 0; p < GROUP_PAIRS; p++) {
                u32x16 pairs = {0};
                if (is_there) {
                    memcpy(&pairs, codes + word_of(unit * GROUP_PAIRS + p, bits), sizeof pairs);
                    pairs = pair_of(pairs, p % pairs_in_word, bits);
                }
                const u32x16 low = rounded((f32x16)(pairs << 16) * scale + base);
                const u32x16 high = rounded((f32x16)(pairs & 0xffff0000u) * scale + base);
                const u32x16 both = low >> 16 | (high & 0xffff0000u);
                memcpy(block + (group * GROUP_PAIRS + p) * COLUMNS + column, &both, sizeof both);
            }
        }
}

/* out = x * W + bias for a matrix of codes: of 4 bits, value = (code - 8) * scale + middle, or of
 * 8, value = code * scale + middle. Sixteen outputs lie together: codes are [num_outputs / 16]
 * [num_inputs * bits / 32][16] words, scales [num_outputs / 16][num_inputs / 32][2][16], a scale's
 * middle behind it. group_sums is room for a number for every group of every row. Best for a few
 * rows. */
void llmrt_multiply_codes(const bf16 *x, const uint32_t *codes, const bf16 *scales,
                          const bf16 *bias, float *group_sums, void *out, int64_t num_rows,
                          int64_t num_inputs, int64_t num_outputs, int64_t is_whole,
                          int64_t bits) {
    const Results all = {out, num_outputs, is_whole};
    const int64_t num_pairs = num_inputs / 2, num_groups = num_inputs / GROUP;
    for (int64_t i = 0; i < num_rows * num_groups; i++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < GROUP; j++) sum += widen(x[i * GROUP + j]);
        group_sums[i] = sum;
    }
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < num_outputs; first += 16) {
        const uint32_t *c = codes + first * num_inputs * bits / 32;
        const bf16 *s = scales + first * num_groups * 2, *b = bias ? bias + first : 0;
        for (int64_t row = 0, next; row < num_rows; row = next) {
            next = row + rows_of_pass(num_rows - row, CODE_ROWS_TOGETHER);
            const uint32_t *x_rows = (const uint32_t *)x + row * num_pairs;
            const float *sums = group_sums + row * num_groups;
            const Results o = results_from(all, row, first);
#define MULTIPLY_CODES(n)                                                                   \
    if (bits == 4)                                                                          \
        multiply_codes(x_rows, c, s, sums, b, num_groups, o, n, 4);                         \
    else                                                                                    \
        multiply_codes(x_rows, c, s, sums, b, num_groups, o, n, 8);
            switch (next - row) {
            case 1: MULTIPLY_CODES(1) break;
            case 2: MULTIPLY_CODES(2) break;
            case 3: MULTIPLY_CODES(3) break;
            case 4: MULTIPLY_CODES(4) break;
            case 5: MULTIPLY_CODES(5) break;
            case 6: MULTIPLY_CODES(6) break;
            case 7: MULTIPLY_CODES(7) break;
            case 8: MULTIPLY_CODES(8) break;
            case 9: MULTIPLY_CODES(9) break;
            case 10: MULTIPLY_CODES(10) break;
            case 11: MULTIPLY_CODES(11) break;
            default: MULTIPLY_CODES(12)
            }
        }
    }
}

/* The same for many rows: each block is decoded first, into `blocks`, of which every one of
 * num_threads threads has one. */
void llmrt_decode_and_multiply(const bf16 *x, const uint32_t *codes, const bf16 *scales,
                               const bf16 *bias, uint32_t *blocks, void *out, int64_t num_rows,
                               int64_t num_inputs, int64_t num_outputs, int64_t is_whole,
                               int64_t bits, int64_t num_threads) {
    const Results all = {out, num_outputs, is_whole};
    const int64_t num_pairs = num_inputs / 2, num_groups = num_inputs / GROUP;
    const int64_t num_parts = number_of_parts(num_rows);
    const int64_t num_pieces = (num_outputs + COLUMNS - 1) / COLUMNS * num_parts;
#pragma omp parallel num_threads(num_threads)
    {
        uint32_t *block = blocks + omp_get_thread_num() * num_pairs * COLUMNS;
        int64_t decoded = -1;
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < num_pieces; piece++) {
            const int64_t first = piece / num_parts * COLUMNS, part = piece % num_parts;
            const int64_t rest = num_outputs - first;
            const int64_t num_columns = rest < COLUMNS ? rest : COLUMNS;
            const uint32_t *c = codes + first * num_inputs * bits / 32;
            const bf16 *s = scales + first * num_groups * 2;
            if (decoded != first && bits == 4)
                decode_block(c, s, num_groups, num_columns, block, 4);
            else if (decoded != first)
                decode_block(c, s, num_groups, num_columns, block, 8);
            decoded = first;
            multiply_rows_by_block((const uint32_t *)x, block, bias ? bias + first : 0, num_pairs,
                                   results_from(all, 0, first), num_columns, block,
                                   num_rows * part / num_parts, num_rows * (part + 1) / num_parts,
                                   num_rows);
        }
    }
}
