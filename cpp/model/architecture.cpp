// Finds the reader for a model file's architecture, and reads the model with it.
#include "model/architecture.h"

#include <algorithm>

#include "core/error.h"

namespace sharpi {

namespace {

std::vector<Architecture> allArchitectures() {
    std::vector<Architecture> all;
#define SHARPI_LISTED_FAMILY(family) \
    for (const Architecture& architecture : families::family()) all.push_back(architecture);
#include "families.inc"
#undef SHARPI_LISTED_FAMILY
    const auto byName = [](const Architecture& a, const Architecture& b) { return std::string(a.name) < b.name; };
    std::sort(all.begin(), all.end(), byName);
    return all;
}

}  // namespace

ModelSpec ModelSpec::read(const Metadata& metadata, const TensorTable& tensors) {
    const std::string name = metadata.text("general.architecture");
    std::string known;
    for (const Architecture& architecture : allArchitectures()) {
        if (name == architecture.name) {
            ModelReader reader(metadata, tensors);
            if (architecture.experts == Experts::Always) reader.requireExperts();
            architecture.read(reader);
            return reader.finish();
        }
        known += (known.empty() ? "" : ", ") + std::string(architecture.name);
    }
    throw Error(ErrorKind::BadModel, "unknown architecture '" + name + "': known are " + known);
}

std::vector<std::string> knownArchitectures() {
    std::vector<std::string> names;
    for (const Architecture& architecture : allArchitectures()) names.emplace_back(architecture.name);
    return names;
}

std::vector<const LayerSpec*> ModelSpec::loadedLayers() const {
    std::vector<const LayerSpec*> all;
    for (const LayerSpec& layer : layers) all.push_back(&layer);
    for (const PredictionSpec& prediction : predictions) all.push_back(&prediction.layer);
    return all;
}

std::vector<const CompressorSpec*> ModelSpec::compressors() const {
    std::vector<const CompressorSpec*> all;
    for (const LayerSpec& layer : layers) {
        if (!layer.attention) continue;
        if (layer.attention->compressor) all.push_back(&*layer.attention->compressor);
        if (layer.attention->indexer) all.push_back(&layer.attention->indexer->compressor);
    }
    return all;
}

void ModelSpec::dropPredictions() {
    predictions.clear();
    while (weights.back().part == ModelPart::Prediction) weights.pop_back();
}

int64_t ModelSpec::parameters(const TensorTable& tensors) const {
    int64_t n = 0;
    for (const TensorInfo& t : tensors.all()) {
        int64_t elements = 1;
        for (const int64_t extent : t.shape) elements *= extent;
        n += elements;
    }
    return n;
}

}  // namespace sharpi
