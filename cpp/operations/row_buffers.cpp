// See row_buffers.h.
#include "operations/row_buffers.h"

#include <algorithm>

namespace sharpi {

int64_t RowBuffers::floats(RowBuffer buffer, const StepLimits& l) {
    const int64_t rows = l.maxRows, pairs = l.maxRows * l.expertsUsed;
    switch (buffer) {
    case RowBuffer::Residual: return rows * l.embedding;
    case RowBuffer::PartOut: return l.partOuts ? rows * l.embedding : 0;
    case RowBuffer::LayerInputs:
    case RowBuffer::LayerRows: return rows * l.layerInputs;
    case RowBuffer::SideOut: return l.parallelParts ? rows * l.embedding : 0;
    case RowBuffer::GatedQueries: return rows * l.gatedQueryWidth;
    case RowBuffer::Queries: return rows * l.queryWidth;
    case RowBuffer::Keys:
    case RowBuffer::Values: return rows * l.kvWidth;
    case RowBuffer::LowRankQueries: return rows * l.queryRank;
    case RowBuffer::HeadQueries: return rows * l.headQueryWidth;
    case RowBuffer::HeadValues: return rows * l.headValueWidth;
    case RowBuffer::Streams: return rows * l.streams * l.embedding;
    case RowBuffer::StreamMix: return rows * l.streams * (2 + l.streams);
    case RowBuffer::CompressorKeys:
    case RowBuffer::CompressorGates: return rows * l.compressorWidth;
    case RowBuffer::IndexQueries: return rows * l.indexWidth;
    case RowBuffer::IndexWeights: return rows * l.indexHeads;
    case RowBuffer::ChosenBlocks: return rows * l.topK;
    case RowBuffer::DeltaMixed: return rows * l.deltaChannels;
    case RowBuffer::DeltaGate: return rows * l.deltaWidth;
    case RowBuffer::DeltaAlpha:
    case RowBuffer::DeltaBeta: return rows * l.deltaHeads;
    case RowBuffer::DeltaSteps: return l.fusedDeltaSteps ? 2 * rows * l.deltaHeads : 0;
    case RowBuffer::MambaMixed: return rows * l.mambaChannels;
    case RowBuffer::MambaGate: return rows * l.mambaWidth;
    case RowBuffer::MambaSteps:
    case RowBuffer::MambaDecays: return rows * l.mambaHeads;
    case RowBuffer::RouterLogits: return rows * l.experts;
    case RowBuffer::Gate:
    case RowBuffer::Up: return std::max({rows * l.denseHidden, pairs * l.expertHidden, rows * l.sharedHidden});
    case RowBuffer::ExpertOut: return pairs * l.expertWidth();
    case RowBuffer::ExpertLatents: return rows * l.expertLatents;
    case RowBuffer::SharedOut: return l.sharedHidden ? rows * l.embedding : 0;
    }
    return 0;
}

void RowBuffers::take(ScratchLayout& layout, const StepLimits& limits, RowBuffer first, RowBuffer last) {
    for (auto i = static_cast<size_t>(first); i <= static_cast<size_t>(last); ++i)
        _at[i] = layout.floats(floats(static_cast<RowBuffer>(i), limits));
}

}  // namespace sharpi
