// Reading models whose metadata and tensor tables were damaged at random: each is read, or is a bad model that is named
// in one line. Under the sanitizers no number from a file overflows on the way, and none is used before it is checked.
#include <gtest/gtest.h>

#include <cmath>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "seed.h"
#include "tiny_model.h"

namespace {

using namespace sharpi;

constexpr int kModels = 4000;

class Damage {
public:
    explicit Damage(uint64_t seed) : _random(seed) {}

    size_t below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(_random); }

    int64_t number() {
        constexpr int64_t most = std::numeric_limits<int64_t>::max();
        const std::vector<int64_t> numbers = {0,
                                              1,
                                              2,
                                              3,
                                              4,
                                              7,
                                              8,
                                              16,
                                              31,
                                              32,
                                              64,
                                              77,
                                              96,
                                              128,
                                              255,
                                              300,
                                              4096,
                                              65537,
                                              1 << 20,
                                              (1 << 24) + 1,
                                              int64_t{1} << 31,
                                              int64_t{1} << 40,
                                              most,
                                              most - 31,
                                              -most - 1,
                                              -1,
                                              -64};
        return numbers[below(numbers.size())];
    }

    MetadataValue value() {
        const double inf = std::numeric_limits<double>::infinity();
        const std::vector<double> floats = {0.0,  -0.0,  1e-6,   0.5, 1.0,  1e4,
                                            -1.0, 1e300, 1e-310, inf, -inf, std::nan("")};
        const std::vector<std::string> texts = {"",     "llama",  "qwen3moe", "qwen35",
                                                "none", "linear", "yarn",     std::string(1000, 'x')};
        switch (below(8)) {
        case 0: return below(2) == 0;
        case 1: return floats[below(floats.size())];
        case 2: return texts[below(texts.size())];
        case 3: return std::vector<double>(below(3), 1.0);
        default: return number();
        }
    }

    void spoilMetadata(tiny::Model& model) {
        static const std::vector<std::string> absent = {"rope.scaling.type",
                                                        "rope.scaling.factor",
                                                        "rope.scale_linear",
                                                        "rope.dimension_count",
                                                        "rope.scaling.original_context_length",
                                                        "attention.value_length",
                                                        "expert_count",
                                                        "expert_weights_scale",
                                                        "nextn_predict_layers",
                                                        "rope.scaling.yarn_beta_fast"};
        auto entry = model.metadata.begin();
        std::advance(entry, below(model.metadata.size()));
        const size_t what = below(8);
        if (what == 0) model.metadata.erase(entry);
        else if (what <= 2) model.metadata[model.key(absent[below(absent.size())])] = value();
        else entry->second = value();
    }

    void spoilTensors(tiny::Model& model) {
        TensorInfo& tensor = model.tensors[below(model.tensors.size())];
        switch (below(6)) {
        case 0: model.tensors.erase(model.tensors.begin() + (&tensor - model.tensors.data())); break;
        case 1: tensor.name = model.tensors[below(model.tensors.size())].name; break;
        case 2: tensor.type = model.tensors[below(model.tensors.size())].type; break;
        case 3: tensor.shape.resize(below(5), number()); break;
        case 4: tensor.bytes = static_cast<uint64_t>(number()); break;
        default:
            if (!tensor.shape.empty()) tensor.shape[below(tensor.shape.size())] = number();
            // Of the right size for its shape, it gets past the table to the reader of the model.
            uint64_t bytes = tensor.shape.empty() || tensor.shape[0] % 32 || tensor.shape[0] < 0
                                 ? 0
                                 : rowBytes(tensor.type, tensor.shape[0]);
            for (size_t d = 1; d < tensor.shape.size(); ++d) bytes *= static_cast<uint64_t>(tensor.shape[d]);
            tensor.bytes = bytes;
        }
    }

private:
    std::mt19937_64 _random;
};

TEST(ModelSpecRandom, DamagedModelsAreReadOrNamed) {
    Damage damage(testSeed(1));
    std::vector<tiny::Model> originals;
    for (const tiny::Family& family : tiny::families()) {
        tiny::Options options;
        options.architecture = family.name;
        originals.emplace_back(options);
        ASSERT_NO_THROW(originals.back().spec());
        originals.back().bytes.clear();
    }
    int read = 0;
    for (int i = 0; i < kModels; ++i) {
        tiny::Model model = originals[damage.below(originals.size())];
        for (size_t n = 1 + damage.below(3); n > 0; --n) {
            if (damage.below(3) > 0) damage.spoilMetadata(model);
            else if (!model.tensors.empty()) damage.spoilTensors(model);
        }
        try {
            const ModelSpec spec = model.spec();
            ++read;
            EXPECT_GT(spec.vocabSize, 0);
            EXPECT_FALSE(spec.layers.empty());
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), ErrorKind::BadModel) << e.what();
            EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
        }
    }
    EXPECT_GT(read, kModels / 50) << "all are refused, so nothing behind the first check is tried";
    EXPECT_LT(read, kModels);
}

}  // namespace
