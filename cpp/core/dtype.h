// Element types of GGUF tensors: their numbers in files, names and block sizes.
// Source: the GGML type enumeration of the GGUF specification.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sharpi {

enum class DType : uint32_t {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ2_XXS = 16,
    IQ2_XS = 17,
    IQ3_XXS = 18,
    IQ1_S = 19,
    IQ4_NL = 20,
    IQ3_S = 21,
    IQ2_S = 22,
    IQ4_XS = 23,
    I32 = 26,
    IQ1_M = 29,
    BF16 = 30,
    TQ1_0 = 34,
    TQ2_0 = 35,
    MXFP4 = 39,
    NVFP4 = 40,
    Q1_0 = 41,
};

// Every quantized type, as X(Q4_0) and so on. Whatever has a case for each of them expands this list. Kernels that take
// long to compile have fewer instances for the rare types, which few files have.
#define SHARPI_COMMON_TYPES(X) \
    X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(MXFP4)
#define SHARPI_RARE_TYPES(X) \
    X(IQ2_XXS) X(IQ2_XS) X(IQ2_S) X(IQ3_XXS) X(IQ3_S) X(IQ1_S) X(IQ1_M) X(TQ1_0) X(TQ2_0) X(NVFP4) X(Q1_0)
#define SHARPI_QUANTIZED_TYPES(X) SHARPI_COMMON_TYPES(X) SHARPI_RARE_TYPES(X)

struct DTypeInfo {
    DType type;
    const char* name;
    uint32_t blockElements;  // elements that share one block of the format
    uint32_t blockBytes;
    bool isFloat;            // F32, F16, BF16: multiplied as floats, never with int8 activations
    bool isInteger = false;  // I32: numbers of other things; never multiplied
};

// nullptr if Sharpi cannot compute with the type of this number.
const DTypeInfo* findDType(uint32_t ggmlType);
// Throws Error(Internal) for a value outside the enumeration.
const DTypeInfo& info(DType type);
// Bytes of one row of `cols` elements; cols must be a multiple of blockElements.
size_t rowBytes(DType type, int64_t cols);

}  // namespace sharpi
