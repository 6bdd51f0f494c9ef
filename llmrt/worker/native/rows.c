/* Norm, gate and rotation, each in one pass over its rows. */

#include "numbers.h"

/* Below so many numbers a second thread costs more than it takes off the first. */
enum { PARALLEL_FROM = 16384 };

/* x += y, where there is a y; out = x / sqrt(mean(x^2) + eps) * weight, by rows of `width`. */
void llmrt_add_rms_norm(float *x, const bf16 *y, const float *weight, bf16 *out, int64_t num_rows,
                        int64_t width, float eps) {
#pragma omp parallel for schedule(static) if (num_rows * width > PARALLEL_FROM)
    for (int64_t row = 0; row < num_rows; row++) {
        float *restrict x_row = x + row * width;
        bf16 *restrict out_row = out + row * width;
        float sum = 0;
        if (y) {
            const bf16 *restrict y_row = y + row * width;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; i++) {
                float value = x_row[i] + widen(y_row[i]);
                x_row[i] = value;
                sum += value * value;
            }
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; i++) sum += x_row[i] * x_row[i];
        }
        float factor = 1 / sqrtf(sum / width + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out_row[i] = narrow(x_row[i] * factor * weight[i]);
    }
}

/* out = silu(gate) * up; a row of gate_up holds `width` of each. */
void llmrt_silu_and_mul(const bf16 *gate_up, bf16 *out, int64_t num_rows, int64_t width) {
#pragma omp parallel for schedule(static) if (num_rows * width > PARALLEL_FROM / 4)
    for (int64_t row = 0; row < num_rows; row++) {
        const bf16 *restrict gate = gate_up + row * 2 * width;
        const bf16 *restrict up = gate + width;
        bf16 *restrict out_row = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float x = widen(gate[i]);
            out_row[i] = narrow(x / (1 + exp_of(-x)) * widen(up[i]));
        }
    }
}

/* Rotate the query and key heads of each token in place, and put its keys and values into the
 * cache. A row of qkv holds Q + 2 K heads; the cache is [2 K, num_slots, D]. The sine is negative
 * in its first half. */
void llmrt_rotate_and_store(bf16 *qkv, const bf16 *cosine, const bf16 *sine, bf16 *cache,
                            const int64_t *slots, int64_t num_tokens, int64_t num_heads,
                            int64_t num_kv_heads, int64_t head_dim, int64_t num_slots) {
    const int64_t num_all = num_heads + 2 * num_kv_heads;
    const int64_t half = head_dim / 2;
#pragma omp parallel for schedule(static) if (num_tokens * num_all * head_dim > PARALLEL_FROM)
    for (int64_t token = 0; token < num_tokens; token++) {
        bf16 *heads = qkv + token * num_all * head_dim;
        const bf16 *restrict c = cosine + token * head_dim;
        const bf16 *restrict s = sine + token * head_dim;
        for (int64_t head = 0; head < num_heads + num_kv_heads; head++) {
            bf16 *restrict low = heads + head * head_dim;
            bf16 *restrict high = low + half;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float a = widen(low[i]), b = widen(high[i]);
                low[i] = narrow(a * widen(c[i]) + b * widen(s[i]));
                high[i] = narrow(b * widen(c[half + i]) + a * widen(s[half + i]));
            }
        }
        for (int64_t head = 0; head < 2 * num_kv_heads; head++)
            memcpy(cache + (head * num_slots + slots[token]) * head_dim,
                   heads + (num_heads + head) * head_dim, head_dim * sizeof(bf16));
    }
}
