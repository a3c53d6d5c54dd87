// The table of one instruction set.
#include "cpu/kernels/internal.h"

namespace sharpi::cpu::SHARPI_ISA {

#define SHARPI_TEXT2(name) #name
#define SHARPI_TEXT(name) SHARPI_TEXT2(name)

static const Kernels kTable = {
    SHARPI_TEXT(SHARPI_ISA),
    dequantizeRow,
    quantizeRow,
    matmul,
    rmsNorm,
    layerNorm,
    add,
    addScaled,
    gatedActivation,
    l2Norm,
    sigmoidMul,
    softcap,
    rope,
    softmax,
    addExps,
    storeKv,
    attention,
    poolBlock,
    indexScores,
    convSilu,
    deltaRule,
    scan,
};

const Kernels& table() { return kTable; }

}  // namespace sharpi::cpu::SHARPI_ISA
