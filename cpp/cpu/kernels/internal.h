// The functions that the kernel sources of one instruction set offer to its table (table.cpp).
//
// Every source in this folder is compiled once for each set, with SHARPI_ISA as the set's name. A source here must not
// instantiate inline functions or templates of other namespaces (std containers, std::function, ...): the linker
// keeps one copy of those, which may be the one that needs AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels.h"

#ifndef SHARPI_ISA
#error "compile the kernels with -DSHARPI_ISA=scalar, avx2, avx512 or amx"
#endif

namespace sharpi::cpu::SHARPI_ISA {

// --- quantized formats and matmul: dequantize.cpp, quantize.cpp, matmul.cpp ---
void dequantizeRow(DType type, const void* row, int64_t cols, float* out);
void quantizeRow(const float* x, int64_t cols, int8_t* q, float* scale, int16_t* sums);
void matmul(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void* scratch);
void matmulQuantized(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void* scratch);

// --- float_*.cpp ---
// F32, F16 and BF16 weights. `scratch` is matmul's, so at least 64 KiB whatever cols is.
void matmulFloat(const MatmulArgs& args, int64_t rowBegin, int64_t rowEnd, void* scratch);
void rmsNorm(const float* x, const float* weight, float eps, int64_t n, float* y);
void layerNorm(const float* x, const float* weight, const float* bias, float eps, int64_t n, float* y);
void add(float* x, const float* y, int64_t n);
void addScaled(float* x, const float* y, float scale, int64_t n);
void gatedActivation(Activation activation, const GatedRow& row, int64_t n);
void l2Norm(float* x, float eps, float scale, int64_t n);
void sigmoidMul(float* x, const float* gate, int64_t n);
void softcap(float* x, float cap, int64_t n);
void rope(float* head, const float* cos, const float* sin, int32_t dims, bool adjacent);
void softmax(float* x, int64_t n);
void addExps(const float* x, float top, int64_t n, double* lanes);
void storeKv(const float* x, int64_t n, KvType type, void* out);
void attention(const AttentionArgs& args, int32_t kvHead, int64_t rowBegin, int64_t rowEnd, void* scratch);
// cpu::attentionScratchBytes asks the scalar table's. Every table gives the same number.
size_t attentionScratch(int32_t heads, int32_t kvHeads, int32_t headDim, int32_t pageTokens);

// --- blocks.cpp ---
void poolBlock(const BlockArgs& args, float* out);
void indexScores(const IndexArgs& args, float* scores, float* scratch);

// --- convolution.cpp, delta.cpp, scan.cpp ---
void convSilu(const ConvArgs& args, int64_t begin, int64_t end);
void deltaRule(const DeltaArgs& args, int32_t begin, int32_t end, void* scratch);
void scan(const ScanArgs& args, int32_t begin, int32_t end, void* scratch);

// --- table.cpp ---
const Kernels& table();

}  // namespace sharpi::cpu::SHARPI_ISA
