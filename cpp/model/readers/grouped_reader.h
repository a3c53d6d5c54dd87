// Parts of layers that few families have: hyper-connections, and attention with queries and outputs of low rank, one
// key for all heads, and rows of blocks of tokens beside the keys. Tensors have the names that DeepSeek V4's files give
// them; all methods throw Error(BadModel) naming the key or the tensor.
#pragma once

#include <string>

#include "model/model_reader.h"

namespace sharpi {

class GroupedReader {
public:
    GroupedReader(ModelReader& model, LayerReader& layer) : _model(model), _layer(layer) {}

    // How the mixer, or the feed-forward part, reads the streams. To be called before the part's norm.
    GroupedReader& mixerStreams();
    GroupedReader& ffnStreams();
    // blockTokens: of the blocks that the layer sees as rows; 0: it sees none. Blocks overlap if an indexer chooses
    // among them.
    GroupedReader& attention(const AttentionParts& parts, int32_t blockTokens, bool indexed);

    // The number of streams, before the first layer; how they end, after the last.
    static void beginStreams(ModelReader& model);
    static void endStreams(ModelReader& model);

private:
    static StreamMixSpec streamMix(ModelReader& model, const std::string& name, int64_t rows, int64_t scales);
    StreamMixSpec partStreams(const std::string& name);
    MatrixId matrix(const std::string& name, int64_t cols, int64_t rows);
    CompressorSpec compressor(const std::string& name, int32_t blockTokens, int32_t headDim, bool overlaps);
    IndexerSpec indexer(int64_t queryRank, int32_t rotated, int32_t blockTokens);

    ModelReader& _model;
    LayerReader& _layer;
};

}  // namespace sharpi
