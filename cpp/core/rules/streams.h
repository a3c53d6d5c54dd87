// Hyper-connections: how a row's streams become the input of a part, and how the part's answer joins them, in an order
// that gives every processor the same bits. n: the number of streams; m: the row's product of StreamMixSpec::fn, n
// numbers for the input, n for the answer and n * n for the mix, of which number a * n + b leads from stream a to b. A
// sum begins at +0 and goes by ascending stream; all operations round to nearest even.
//
//   input[a]  = sigmoid(fma(m[a], scale[0], base[a])) + epsilon                    (core/portable.h)
//   x         = sum of fma(input[a], stream[a], .)
//   answer[b] = 2 * sigmoid(fma(m[n + b], scale[1], base[n + b]))
//   mix[a][b] : z = fma(m[2n + an + b], scale[2], base[2n + an + b]); e = exp(z - the row's largest z);
//               e / (sum over b of e) + epsilon. Then columns are normalized, and iterations - 1 times rows and then
//               columns: each number is divided by (the sum of its row or column) + epsilon.
//   stream'[b] = fma(answer[b], part, +0), then fma(mix[a][b], stream[a], .) for a ascending
//
// The model's end has the input alone.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/portable.h"

namespace sharpi {

constexpr int32_t kMostStreams = 16;

SHARPI_PORTABLE float streamInput(float product, float scale, float base, float epsilon) {
    return portableSigmoid(fmaf(product, scale, base)) + epsilon;
}

// A pass over rows or columns: the n numbers of each of n lines, `across` apart, lines `along` apart.
SHARPI_PORTABLE void normalizeLines(float* mix, int32_t n, int32_t along, int32_t across, float epsilon) {
    for (int32_t line = 0; line < n; ++line) {
        float sum = 0.0f;
        for (int32_t i = 0; i < n; ++i) sum = sum + mix[line * along + i * across];
        sum = sum + epsilon;
        for (int32_t i = 0; i < n; ++i) mix[line * along + i * across] = mix[line * along + i * across] / sum;
    }
}

// mix: [n, n], z on entry.
SHARPI_PORTABLE void mixOfStreams(float* mix, int32_t n, int32_t iterations, float epsilon) {
    for (int32_t a = 0; a < n; ++a) {
        float* const row = mix + a * n;
        float largest = -INFINITY, sum = 0.0f;
        for (int32_t b = 0; b < n; ++b) largest = row[b] > largest ? row[b] : largest;
        for (int32_t b = 0; b < n; ++b) {
            row[b] = portableExp(row[b] - largest);
            sum = sum + row[b];
        }
        for (int32_t b = 0; b < n; ++b) row[b] = row[b] / sum + epsilon;
    }
    normalizeLines(mix, n, 1, n, epsilon);
    for (int32_t i = 1; i < iterations; ++i) {
        normalizeLines(mix, n, n, 1, epsilon);
        normalizeLines(mix, n, 1, n, epsilon);
    }
}

}  // namespace sharpi
