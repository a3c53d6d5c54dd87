// How layers are composed of operations: which call adds what a part gave, so that a backend can join it to the norm
// that follows.
#include <gtest/gtest.h>

#include "cpu/cpu_backend.h"
#include "forwarding.h"
#include "tiny_pass.h"

namespace {

using namespace sharpi;
using namespace tiny;

// The calls that add a part: those that also norm x, those that also copy it, and those that do nothing else.
struct PartsAdded {
    int norms = 0, copies = 0, alone = 0;
    bool operator==(const PartsAdded& other) const {
        return norms == other.norms && copies == other.copies && alone == other.alone;
    }
};

std::ostream& operator<<(std::ostream& out, const PartsAdded& added) {
    return out << added.norms << " with a norm, " << added.copies << " with a copy, " << added.alone << " alone";
}

class Counting : public CpuBackend {
public:
    Counting() : CpuBackend(1) {}
    PartsAdded added;
    Operations& operations() override { return _counted; }

private:
    class Counted : public Forwarding {
    public:
        explicit Counted(Counting& owner) : Forwarding(owner.CpuBackend::operations()), _added(owner.added) {}
        void norm(const OptionalPart& part, const NormCall& call, Readers readers, bool floats) override {
            _added.norms += part.has_value();
            Forwarding::norm(part, call, readers, floats);
        }
        void copyRows(const OptionalPart& part, Readers readers) override {
            _added.copies += part.has_value();
            Forwarding::copyRows(part, readers);
        }
        void addPart(const PartCall& part) override {
            ++_added.alone;
            Forwarding::addPart(part);
        }

    private:
        PartsAdded& _added;
    };
    Counted _counted{*this};
};

PartsAdded addedIn(const tiny::Options& options) {
    const Model model(options);
    tiny::Pass<Counting> pass(model, 4, 64, KvType::F32, 64);
    Batch batch;
    const int32_t sequence = pass.kv.createSequence();
    for (int32_t t = 0; t < 3; ++t) batch.add(RowKind::Prompt, 5 + t, t, sequence, t == 2);
    pass.kv.extend(sequence, batch.size());
    pass.forward.run(batch, nullptr);
    return pass.backend.added;
}

TEST(Layers, APartIsAddedWithTheNormThatFollows) {
    const auto of = [](const char* architecture, int64_t experts, int64_t inputs) {
        tiny::Options options;
        options.architecture = architecture;
        options.layers = 4;
        options.experts = experts;
        options.layerInputs = inputs;
        return options;
    };
    EXPECT_EQ(addedIn(of("llama", 0, 0)), (PartsAdded{0, 0, 0}));
    EXPECT_EQ(addedIn(of("gemma2", 0, 0)), (PartsAdded{7, 0, 1}));
    EXPECT_EQ(addedIn(of("gemma4", 4, 0)), (PartsAdded{7, 0, 1}));
    EXPECT_EQ(addedIn(of("gemma4", 0, 32)), (PartsAdded{7, 4, 1}));
}

}  // namespace
