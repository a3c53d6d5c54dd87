// The one forward pass: takes a Batch through the layers that a ModelSpec lists and gives logits. Every model,
// placement and batch shape goes through here.
#pragma once

#include <memory>
#include <vector>

#include "engine/backend.h"
#include "engine/batch.h"
#include "memory/kv_cache.h"
#include "model/weights.h"

namespace sharpi {

class ForwardPass {
public:
    // maxRows: the largest batch; context: the largest position + 1. All scratch is taken here.
    ForwardPass(const ModelSpec& spec, const Weights& weights, Backend& backend, KvCache& kv, int64_t maxRows, int64_t context);
    static size_t scratchBytes(const ModelSpec& spec, int64_t maxRows, int64_t context);

    // Room in the KV cache for the batch's rows must have been made (KvCache::extend).
    // logits: [batch.logitRows.size(), vocabSize], in host memory; may be nullptr when no row wants any.
    void run(const Batch& batch, float* logits);

private:
    // A layer's weights as kernels take them: looked up once, at loading.
    struct Layer {
        const float *mixerNorm, *ffnNorm, *qNorm, *kNorm;
        Matrix q, k, v, output, gate, up, down;
        const float *qBias, *kBias, *vBias, *outputBias;
        RopeTable rope;
        ExpertWeights experts;
    };
    struct Rotation {
        RopeSpec spec;
        Buffer cos, sin;
    };

    const float* vector(const WeightSlice& slice);
    RopeTable rotation(const RopeSpec& spec);
    void attention(const LayerSpec& spec, const Layer& layer, size_t index, const Batch& batch,
                   const std::vector<SequenceRows>& sequences);
    void feedForward(const LayerSpec& spec, const Layer& layer, int64_t rows);

    const ModelSpec& _spec;
    const Weights& _weights;
    Backend& _backend;
    KvCache& _kv;
    int64_t _maxRows, _context;
    std::vector<Layer> _layers;
    std::vector<Buffer> _vectors;
    std::vector<std::unique_ptr<Rotation>> _rotations;
    const float* _outputNorm;
    Buffer _x, _normed, _block, _q, _k, _v, _attended, _gate, _up;
};

}  // namespace sharpi
