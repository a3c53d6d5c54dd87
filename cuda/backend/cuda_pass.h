// What the GPU's operations share: the stream, the working memory, the batch at hand and the forms in which its rows
// lie; and the one place that knows where a matrix is.
//
// A batch's rows are exact or fast. Exact rows follow core/contract.h, so they have the CPU's bits: decode rows always,
// prompt rows in PromptMode::Exact. Fast rows, which are the other prompt rows, go through tensor cores. Each operation
// takes both ranges, and a row's range alone decides its bits.
//
// A batch of decode rows alone is a step. In a step the CPU may compute some rows of feed-forward matrices and of the
// output head, and experts that are in no slot. In other batches the GPU computes everything, and what is not resident
// is brought to it.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>

#include "cpu/share/host_share.h"
#include "cpu/share/host_work.h"
#include "device/stream.h"
#include "kernels/attention/attention.h"
#include "kernels/matmul/matmul.h"
#include "kernels/rows/residual.h"
#include "memory/stream/table_rows.h"
#include "memory/stream/weight_stream.h"
#include "operations/host_clock.h"
#include "operations/operations.h"
#include "plan/gpu_scratch.h"

namespace sharpi {

// Rows in the forms that products read.
struct Activations {
    cuda::RowOutputs exact;  // [exact rows, cols]: floats and int8 blocks
    cuda::HalfRows fast;     // [fast rows, cols]
    int64_t cols = 0;
    // The exact rows from `first` on.
    cuda::MatvecInput from(int64_t first) const {
        return cuda::rowsFrom(cuda::MatvecInput{exact.floats, exact.quantized}, first, cols);
    }
};

class CudaPass {
public:
    CudaPass(cuda::Stream& s, HostClock& ofBackend) : stream(s), clock(ofBackend) {}

    cuda::Stream& stream;
    HostClock& clock;
    WeightStream* weights = nullptr;
    TableRows* tables = nullptr;  // those that are not resident
    HostShare* share = nullptr;   // if the CPU computes rows or experts
    StepLimits limits;
    const GpuScratch* layout = nullptr;
    uint8_t* memory = nullptr;  // layout->bytes()

    // The batch at hand.
    BatchView view;
    int64_t logitRows = 0;
    bool step = false;         // it has decode rows alone
    HostWork* work = nullptr;  // of the pass whose launches are being made

    template <typename T> T* at(size_t offset) const { return reinterpret_cast<T*>(memory + offset); }
    float* floats(size_t offset) const { return at<float>(offset); }
    // Waits for all work of the stream.
    void await() {
        clock.await([this] { stream.synchronize(); });
    }
    float* floats(RowBuffer buffer) const { return at<float>(layout->rows[buffer]); }
    cuda::HalfRows halves(const GpuScratch::Halves& of) const {
        return {at<uint16_t>(of.hi), of.hi == of.lo ? nullptr : at<uint16_t>(of.lo)};
    }
    int64_t exactRows() const { return view.exactRows; }
    int64_t fastRows() const { return view.fastRows(); }
    // Whether recurrent layers take all exact rows in one launch.
    bool statesInSteps() const { return view.mostExact <= cuda::kDeltaStepRows; }

    // Where rows for these readers go, in the forms that the readers take. perRow: rows for each row of the batch.
    const Activations& shape(RowInput input, Readers readers, int64_t cols, int64_t perRow = 1);
    // Throws Error(Internal) unless these rows were written in this pass.
    const Activations& input(RowInput input) const;
    void forgetInputs() { _inputs = {}; }
    // What writes such exact rows does not write their columns (cuda::WideColumns).
    void withoutColumns(RowInput input) { _inputs[static_cast<size_t>(input)].exact.quantized.wide.written = false; }
    // Where such exact rows lie as floats, whether their readers take them or not.
    float* exactFloats(RowInput input) const { return floats(layout->input(input).exact.floats); }
    // The forms of exact rows alone, in buffers of the caller's choice.
    cuda::RowOutputs exactForms(Readers readers, const GpuScratch::Exact& to, int64_t rows, int64_t cols) const;

    // Calls body(first, rows) for groups of up to `most` of `rows` rows.
    template <typename Body> static void forGroups(int64_t rows, int64_t most, const Body& body) {
        for (int64_t first = 0; first < rows; first += most)
            body(first, static_cast<int>(std::min(most, rows - first)));
    }
    // The same for the exact rows, in groups of as many as a launch of the contract's products takes.
    template <typename Body> void forExactGroups(const Body& body) const {
        forGroups(exactRows(), cuda::kMaxMatvecRows, body);
    }
    // Calls body(part, begin, stays) for each part of a matrix that is on the device at once: its rows [begin, begin +
    // part.rows). In a step these are the rows that the CPU does not compute. stays: the part is not overwritten later
    // in the pass.
    template <typename Body> void forParts(const Weight& w, const Body& body) const {
        if (w.resident()) {
            weights->arrive(w.group);
            body(w, 0, true);
        } else if (step) {
            weights->forPieces(w.group,
                               [&](const std::vector<Matrix>& parts, int64_t begin) { body(parts[0], begin, false); });
        } else {
            weights->forPieces(w.group, w.member, [&](const Matrix& part, int64_t begin) { body(part, begin, false); });
        }
    }
    // Calls body(part of a, part of b, begin) for each part of two matrices that is on the device at once. Returns
    // false, and has done nothing, if one matrix comes after the other.
    template <typename Body> bool forPairs(const Weight& a, const Weight& b, const Body& body) const {
        if (a.resident() && b.resident()) {
            for (const Weight* w : {&a, &b}) weights->arrive(w->group);
            body(a, b, 0);
            return true;
        }
        if (a.resident() || a.group != b.group || !step) return false;
        weights->forPieces(a.group,
                           [&](const std::vector<Matrix>& parts, int64_t begin) { body(parts[0], parts[1], begin); });
        return true;
    }
    // How a layer's experts are computed.
    enum class ExpertPath {
        Resident,  // in a step: all of them are on the device
        Slots,     // in a step: some are in slots, and the CPU takes its part
        Stacks,    // in other batches: what is not on the device is brought over
    };
    ExpertPath pathOf(const WeightStack& experts) const {
        return !step ? ExpertPath::Stacks : experts.resident() ? ExpertPath::Resident : ExpertPath::Slots;
    }
    // Calls body(part, index) for each part of a stack that is on the device at once. Not in a step. slots: the slots
    // of the stack's layer, which table[expert] numbers; ordinals[expert]: the place of an expert that is in none among
    // those that are brought over.
    template <typename Body>
    void forStackParts(const WeightStack& stack, const MatrixStack& slots, const int32_t* table,
                       const int32_t* ordinals, const Body& body) const {
        if (stack.resident()) return body(stack, cuda::ExpertIndex{});
        if (slots.count > 0) body(slots, cuda::ExpertIndex{table, 0, slots.count});
        weights->forExperts(stack.group, [&](const MatrixStack& part, int32_t first) {
            body(part, cuda::ExpertIndex{ordinals, first, first + part.count});
        });
    }
    // What reads the residual next.
    static cuda::NextRows nextOf(const NormCall& norm);
    // Adds the part, if there is one, to the rows [first, first + rows) of the residual, and writes what follows.
    void nextRows(const OptionalPart& part, const cuda::NextRows& next, int64_t first, int64_t rows,
                  const cuda::RowOutputs& out) const;
    // The norm of the residual's rows index[0 .. rows), or of its first rows without an index.
    void normRows(const int32_t* index, const cuda::NextRows& next, int64_t rows, const cuda::RowOutputs& out) const;
    // The batch's tokens' rows of a table.
    void readTable(const Weight& table, float* out);

private:
    std::array<Activations, kRowInputs> _inputs;  // by RowInput
};

}  // namespace sharpi
