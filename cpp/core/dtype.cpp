// Block sizes of the element types. Source: the tensor type list of the GGUF specification; the byte counts are
// those of the structs in blocks.h, checked there.
#include "core/dtype.h"

#include <iterator>
#include <string>

#include "core/error.h"

namespace sharpi {

static const DTypeInfo kTypes[] = {
    {DType::F32, "F32", 1, 4, true},
    {DType::F16, "F16", 1, 2, true},
    {DType::BF16, "BF16", 1, 2, true},
    {DType::I32, "I32", 1, 4, false, true},
    {DType::Q4_0, "Q4_0", 32, 18, false},
    {DType::Q4_1, "Q4_1", 32, 20, false},
    {DType::Q5_0, "Q5_0", 32, 22, false},
    {DType::Q5_1, "Q5_1", 32, 24, false},
    {DType::Q8_0, "Q8_0", 32, 34, false},
    {DType::Q2_K, "Q2_K", 256, 84, false},
    {DType::Q3_K, "Q3_K", 256, 110, false},
    {DType::Q4_K, "Q4_K", 256, 144, false},
    {DType::Q5_K, "Q5_K", 256, 176, false},
    {DType::Q6_K, "Q6_K", 256, 210, false},
    {DType::IQ4_NL, "IQ4_NL", 32, 18, false},
    {DType::IQ4_XS, "IQ4_XS", 256, 136, false},
    {DType::MXFP4, "MXFP4", 32, 17, false},
    {DType::IQ2_XXS, "IQ2_XXS", 256, 66, false},
    {DType::IQ2_XS, "IQ2_XS", 256, 74, false},
    {DType::IQ2_S, "IQ2_S", 256, 82, false},
    {DType::IQ3_XXS, "IQ3_XXS", 256, 98, false},
    {DType::IQ3_S, "IQ3_S", 256, 110, false},
    {DType::IQ1_S, "IQ1_S", 256, 50, false},
    {DType::IQ1_M, "IQ1_M", 256, 56, false},
    {DType::TQ1_0, "TQ1_0", 256, 54, false},
    {DType::TQ2_0, "TQ2_0", 256, 66, false},
    {DType::NVFP4, "NVFP4", 64, 36, false},
    {DType::Q1_0, "Q1_0", 128, 18, false},
};

#define SHARPI_COUNT(T) +1
static_assert(4 + SHARPI_QUANTIZED_TYPES(SHARPI_COUNT) == std::size(kTypes), "a type is missing in one of the lists");
#undef SHARPI_COUNT

const DTypeInfo* findDType(uint32_t ggmlType) {
    for (const DTypeInfo& entry : kTypes)
        if (static_cast<uint32_t>(entry.type) == ggmlType) return &entry;
    return nullptr;
}

const DTypeInfo& info(DType type) {
    const DTypeInfo* found = findDType(static_cast<uint32_t>(type));
    if (!found)
        throw Error(ErrorKind::Internal, "no element type has number " + std::to_string(static_cast<uint32_t>(type)));
    return *found;
}

size_t rowBytes(DType type, int64_t cols) {
    const DTypeInfo& entry = info(type);
    if (cols < 0 || cols % entry.blockElements != 0)
        throw Error(ErrorKind::InvalidArgument, "a row of " + std::to_string(cols) +
                                                    " elements is not whole blocks of " + entry.name + " (" +
                                                    std::to_string(entry.blockElements) + ")");
    return static_cast<size_t>(cols / entry.blockElements) * entry.blockBytes;
}

}  // namespace sharpi
