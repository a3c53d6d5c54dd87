// Mamba 2 on the GPU: in one launch for few rows and row after row for many bit for bit against the CPU's kernels, in
// chunks against double precision; with any number of sequences, from and to any states.
#include "core/rules/mamba.h"
#include "delta_test.h"
#include "kernels/delta/mamba.h"

namespace sharpi::cuda {
namespace {

// States and products of a batch on the host, and the CPU's results for them.
struct MambaWorld {
    MambaShape shape;
    std::vector<Part> parts;
    PartRows list;
    std::vector<float> conv, convBias, stepBias, rate, skip, norm;  // weights; convBias may be empty
    std::vector<float> convStates, matrixStates;
    std::vector<float> mixed, gate, steps, decays;

    MambaWorld(const MambaShape& s, const std::vector<Part>& p) : shape(s), parts(p), list(p) {}

    // gate becomes the gated answers, mixed and steps what prepareMamba makes of them.
    void useCpu() {
        std::vector<float> out(gate.size(), NAN);
        int64_t row = 0;
        for (const Part& part : parts) {
            int32_t entry = part.from;
            int64_t done = 0;
            for (const auto& [until, next] : part.kept) {
                convolve(row + done, until - done, entry, next);
                prepare(row + done, until - done);
                scan(row + done, until - done, entry, next, out);
                entry = next;
                done = until;
            }
            row += part.rows();
        }
        cpu::kernels().gatedActivation({}, {gate.data(), out.data()}, static_cast<int64_t>(gate.size()));
    }

    // The scan alone, in double precision: what becomes of `gate` and of matrixStates. mixed, steps and decays are what
    // prepareMamba makes of them.
    std::vector<double> scanInDouble(std::vector<double>& states) const {
        std::vector<double> y(gate.size());
        states.assign(matrixStates.begin(), matrixStates.end());
        const int64_t matrix = int64_t{shape.stateDim} * shape.headDim;
        for (int32_t h = 0; h < shape.heads; ++h) {
            int64_t row = 0;
            for (const Part& part : parts) {
                std::vector<double> state(static_cast<size_t>(matrix), 0.0);
                if (part.from >= 0)
                    state.assign(&matrixStates[part.from * shape.matrixFloats() + h * matrix],
                                 &matrixStates[part.from * shape.matrixFloats() + h * matrix] + matrix);
                auto kept = part.kept.begin();
                for (int64_t t = 0; t < part.rows(); ++t, ++row) {
                    scanRow(row, h, state, &y[row * shape.width() + int64_t{h} * shape.headDim]);
                    if (t + 1 != kept->first) continue;
                    std::copy(state.begin(), state.end(),
                              states.begin() + kept->second * shape.matrixFloats() + h * matrix);
                    ++kept;
                }
            }
        }
        return y;
    }

    std::vector<float> normed() const {
        std::vector<float> y = gate;
        const int64_t group = shape.width() / shape.groups;
        for (size_t at = 0; at < y.size(); at += static_cast<size_t>(group)) {
            const float* weights = &norm[at % static_cast<size_t>(shape.width())];
            cpu::kernels().rmsNorm(&gate[at], weights, kEps, group, &y[at]);
        }
        return y;
    }

private:
    void scanRow(int64_t row, int32_t head, std::vector<double>& state, double* y) const {
        const float *
            x = &mixed[row * shape.channels() + int64_t{head} * shape.headDim],
           *b = &mixed[row * shape.channels() + shape.width() + int64_t{head / shape.headsPerGroup()} * shape.stateDim],
           *c = b + int64_t{shape.groups} * shape.stateDim;
        const double decay = decays[row * shape.heads + head], step = steps[row * shape.heads + head];
        for (int32_t p = 0; p < shape.headDim; ++p) {
            double sum = double{skip[head]} * x[p];
            for (int32_t n = 0; n < shape.stateDim; ++n) {
                double& element = state[int64_t{n} * shape.headDim + p];
                element = element * decay + step * x[p] * b[n];
                sum += element * c[n];
            }
            const double g = gate[row * shape.width() + int64_t{head} * shape.headDim + p];
            y[p] = sum * g / (1.0 + std::exp(-g));
        }
    }
    void convolve(int64_t row, int64_t count, int32_t entry, int32_t next) {
        cpu::ConvArgs args;
        args.x = &mixed[row * shape.channels()];
        args.rows = count;
        args.channels = shape.channels();
        args.weight = conv.data();
        args.bias = convBias.empty() ? nullptr : convBias.data();
        args.width = shape.convWidth;
        args.from = entry < 0 ? nullptr : &convStates[entry * shape.convFloats()];
        args.to = &convStates[next * shape.convFloats()];
        cpu::kernels().convSilu(args, 0, shape.channels());
    }
    void prepare(int64_t row, int64_t count) {
        for (int64_t i = row * shape.heads; i < (row + count) * shape.heads; ++i) {
            steps[i] = mambaStep(steps[i], stepBias[i % shape.heads]);
            decays[i] = mambaDecay(steps[i], rate[i % shape.heads]);
        }
    }
    void scan(int64_t row, int64_t count, int32_t entry, int32_t next, std::vector<float>& out) {
        std::vector<float> scratch(cpu::stateScratchBytes(shape.stateDim) / sizeof(float) + 16);
        auto* aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
        for (int32_t h = 0; h < shape.heads; ++h) {
            const int64_t matrix = int64_t{h} * shape.stateDim * shape.headDim;
            cpu::ScanArgs args;
            args.x = &mixed[row * shape.channels() + h * shape.headDim];
            args.b = &mixed[row * shape.channels() + shape.width() + h / shape.headsPerGroup() * shape.stateDim];
            args.c = args.b + int64_t{shape.groups} * shape.stateDim;
            args.rowStride = shape.channels();
            args.decay = &decays[row * shape.heads + h];
            args.step = &steps[row * shape.heads + h];
            args.stepStride = shape.heads;
            args.skip = skip[h];
            args.out = &out[row * shape.width() + h * shape.headDim];
            args.outStride = shape.width();
            args.rows = count;
            args.stateDim = shape.stateDim;
            args.headDim = shape.headDim;
            args.from = entry < 0 ? nullptr : &matrixStates[entry * shape.matrixFloats() + matrix];
            args.to = &matrixStates[next * shape.matrixFloats() + matrix];
            cpu::kernels().scan(args, 0, shape.headDim, aligned);
        }
    }
};

// The copy of a MambaWorld on the device.
struct DeviceMamba {
    DeviceArray<float> conv, convBias, stepBias, rate, skip, norm, convStates, matrixStates, mixed, gate, steps, decays;
    DeviceArray<int32_t> from, to, begin, end;
    DeltaBatch batch;
    MambaParameters parameters;
    MambaInputs inputs;
    DeltaStates states;
    int64_t longest;
    DeviceArray<uint8_t> windows;

    explicit DeviceMamba(const MambaWorld& w)
        : conv(w.conv),
          convBias(w.convBias),
          stepBias(w.stepBias),
          rate(w.rate),
          skip(w.skip),
          norm(w.norm),
          convStates(w.convStates),
          matrixStates(w.matrixStates),
          mixed(w.mixed),
          gate(w.gate),
          steps(w.steps),
          decays(w.decays),
          from(w.list.from),
          to(w.list.to),
          begin(w.list.begin),
          end(w.list.end),
          batch{w.list.rows, from.get(), to.get(), {begin.get(), end.get(), static_cast<int64_t>(w.list.begin.size())}},
          parameters{conv.get(),
                     w.convBias.empty() ? nullptr : convBias.get(),
                     stepBias.get(),
                     rate.get(),
                     skip.get(),
                     norm.get(),
                     kEps},
          inputs{mixed.get(), gate.get(), steps.get(), decays.get()},
          states{convStates.get(), matrixStates.get()},
          longest(std::max_element(w.parts.begin(), w.parts.end(),
                                   [](const Part& a, const Part& b) { return a.rows() < b.rows(); })
                      ->rows()),
          windows(mambaWindowBytes(w.list.rows, batch.sequences.count, w.shape)) {}
};

class Mamba : public GpuTest {
protected:
    MambaWorld world(const MambaShape& shape, const std::vector<Part>& parts, bool biased = true) {
        MambaWorld w(shape, parts);
        w.conv = randomFloats(shape.convWidth * shape.channels(), 0.5f);
        if (biased) w.convBias = randomFloats(shape.channels());
        w.stepBias = randomFloats(shape.heads);
        w.rate = randomFloats(shape.heads);
        for (float& rate : w.rate) rate = -std::exp(0.5f * rate - 1.0f);
        w.skip = randomFloats(shape.heads);
        w.norm = randomFloats(shape.width());
        w.convStates.assign(static_cast<size_t>(w.list.entries * shape.convFloats()), NAN);
        w.matrixStates.assign(static_cast<size_t>(w.list.entries * shape.matrixFloats()), NAN);
        for (const Part& part : parts) {
            if (part.from < 0) continue;
            const auto conv = randomFloats(shape.convFloats()), matrix = randomFloats(shape.matrixFloats());
            std::copy(conv.begin(), conv.end(), w.convStates.begin() + part.from * shape.convFloats());
            std::copy(matrix.begin(), matrix.end(), w.matrixStates.begin() + part.from * shape.matrixFloats());
        }
        w.mixed = randomFloats(w.list.rows * shape.channels(), 2.0f);
        w.gate = randomFloats(w.list.rows * shape.width(), 3.0f);
        w.steps = randomFloats(w.list.rows * shape.heads, 3.0f);
        w.decays.assign(w.steps.size(), NAN);
        return w;
    }

    static std::string nameOf(const MambaWorld& w) {
        return std::to_string(w.shape.heads) + " heads of " + std::to_string(w.shape.headDim) + ", states of " +
               std::to_string(w.shape.stateDim) + ", " + std::to_string(w.list.rows) + " rows";
    }
    static void expectSame(const MambaWorld& expected, const DeviceMamba& device, const std::string& how) {
        const std::string what = nameOf(expected) + ", " + how;
        ASSERT_TRUE(sameBits(expected.gate, device.gate.read())) << what;
        EXPECT_TRUE(sameBits(expected.convStates, device.convStates.read())) << what << ", states of the convolution";
        EXPECT_TRUE(sameBits(expected.matrixStates, device.matrixStates.read())) << what << ", states";
    }
    DeviceArray<uint8_t> zeros(int64_t sequences, const MambaShape& shape) {
        return DeviceArray<uint8_t>(std::vector<uint8_t>(stepMambaBytes(sequences, shape), 0));
    }
    void rowAfterRow(const DeviceMamba& d, const MambaShape& shape, const DeltaBatch& batch) {
        prepareMamba(stream(), d.inputs, d.parameters, shape, d.states, batch, d.longest, d.windows.get());
        scanMamba(stream(), d.inputs, d.parameters, shape, d.states, batch);
    }

    // Sequences of up to 8 rows, `rows` in all, fresh and not, in place and not, some of which keep the state of every
    // row.
    std::vector<Part> manyParts(int64_t rows) {
        std::vector<Part> parts;
        int32_t entries = 0;
        for (int64_t left = rows; left > 0;) {
            const int64_t count = std::min<int64_t>(left, 1 + static_cast<int64_t>(random()() % kDeltaStepRows));
            Part part = {random()() % 4 == 0 ? -1 : entries++, {}};
            const bool drafted = random()() % 2 == 0;
            for (int64_t t = 1; drafted && t < count; ++t) part.kept.emplace_back(t, entries++);
            part.kept.emplace_back(count, part.from >= 0 && random()() % 2 ? part.from : entries++);
            parts.push_back(part);
            left -= count;
        }
        return parts;
    }
};

// {heads, groups, headDim, stateDim, convWidth}: with states and heads that fill no register, and as models have them.
const std::vector<MambaShape> kShapes = {{4, 2, 16, 16, 4}, {3, 1, 16, 20, 2},   {6, 3, 12, 24, 3},  {4, 2, 32, 16, 4},
                                         {2, 1, 80, 7, 4},  {8, 2, 64, 128, 4},  {4, 1, 64, 100, 4}, {2, 2, 64, 256, 4},
                                         {2, 1, 4, 200, 3}, {16, 1, 64, 128, 4}, {64, 8, 64, 128, 4}};

// Few rows: fresh and not, in place and not, with states kept in between.
const std::vector<Part> kFewParts = {{-1, {{1, 0}}}, {1, {{2, 2}}}, {3, {{1, 4}, {2, 5}, {3, 3}}}, {6, {{1, 6}}}};
const std::vector<Part> kDraftedInPlace = {{2, {{1, 0}, {2, 1}, {3, 3}, {4, 4}, {5, 5}, {6, 6}, {7, 7}, {8, 2}}}};
// More rows than a block stages at once, and than a tile of the convolution has.
const std::vector<Part> kLongParts = {{-1, {{1, 0}}}, {1, {{2, 2}}}, {3, {{1, 4}, {2, 5}, {3, 3}}}, {6, {{21, 6}}}};
const std::vector<Part> kTiledParts = {
    {4, {{64, 0}, {65, 1}, {200, 4}}}, {-1, {{3, 7}, {9, 8}, {150, 2}}}, {5, {{2, 5}}}, {6, {{70, 6}}}};

TEST_F(Mamba, StepsWithTheBitsOfTheCpu) {
    for (const MambaShape& shape : kShapes) {
        for (const auto& parts : {kFewParts, kDraftedInPlace}) {
            MambaWorld w = world(shape, parts, random()() % 2);
            const DeviceMamba device(w);
            const DeviceArray<uint8_t> scratch = zeros(device.batch.sequences.count, shape);
            stepMamba(stream(), device.inputs, device.parameters, shape, device.states, device.batch, scratch.get());
            EXPECT_TRUE(sameBits(w.mixed, device.mixed.read()));
            EXPECT_TRUE(sameBits(w.steps, device.steps.read()));
            EXPECT_EQ(std::vector<uint8_t>(scratch.size(), 0), scratch.read()) << nameOf(w);
            w.useCpu();
            expectSame(w, device, "a step");
        }
    }
}

TEST_F(Mamba, GoesRowAfterRowWithTheBitsOfTheCpu) {
    for (const MambaShape& shape : kShapes) {
        for (const auto& parts : {kFewParts, kDraftedInPlace, kLongParts, kTiledParts}) {
            MambaWorld w = world(shape, parts, random()() % 2);
            const DeviceMamba device(w);
            prepareMamba(stream(), device.inputs, device.parameters, shape, device.states, device.batch, device.longest,
                         device.windows.get());
            const std::vector<float> mixed = device.mixed.read(), steps = device.steps.read(),
                                     decays = device.decays.read();
            scanMamba(stream(), device.inputs, device.parameters, shape, device.states, device.batch);
            w.useCpu();
            ASSERT_TRUE(sameBits(w.mixed, mixed)) << nameOf(w) << ", convolution";
            EXPECT_TRUE(sameBits(w.steps, steps)) << nameOf(w) << ", steps";
            EXPECT_TRUE(sameBits(w.decays, decays)) << nameOf(w) << ", decays";
            expectSame(w, device, "row after row");
        }
    }
}

// A text in pieces, each by the way that its length allows, through several entries and in place.
TEST_F(Mamba, CutAnywhere) {
    for (const MambaShape& shape : {kShapes[0], kShapes[1], kShapes[5], kShapes[7]}) {
        constexpr int64_t kRows = 100;
        MambaWorld whole = world(shape, {{-1, {{kRows, 0}}}});
        const MambaWorld text = whole;
        whole.useCpu();
        for (const bool inPlace : {true, false}) {
            MambaWorld piece = text;
            std::vector<float> answers;
            int32_t entry = -1;
            for (int64_t at = 0; at < kRows;) {
                const int64_t most = random()() % 3 ? kDeltaStepRows : 40;
                const int64_t count =
                    std::min<int64_t>(kRows - at, 1 + static_cast<int64_t>(random()() % static_cast<uint32_t>(most)));
                const int32_t to = inPlace ? 2 : entry == 2 ? 3 : 2;
                piece.parts = {{entry, {{count, to}}}};
                piece.list = PartRows(piece.parts);
                const auto rowsOf = [&](const std::vector<float>& all) {
                    const int64_t width = static_cast<int64_t>(all.size()) / kRows;
                    return std::vector<float>(all.begin() + at * width, all.begin() + (at + count) * width);
                };
                piece.mixed = rowsOf(text.mixed), piece.gate = rowsOf(text.gate);
                piece.steps = rowsOf(text.steps), piece.decays = rowsOf(text.decays);
                const DeviceMamba device(piece);
                const DeviceArray<uint8_t> scratch = zeros(device.batch.sequences.count, shape);
                if (count <= kDeltaStepRows) {
                    stepMamba(stream(), device.inputs, device.parameters, shape, device.states, device.batch,
                              scratch.get());
                } else {
                    rowAfterRow(device, shape, device.batch);
                }
                piece.convStates = device.convStates.read(), piece.matrixStates = device.matrixStates.read();
                const std::vector<float> got = device.gate.read();
                answers.insert(answers.end(), got.begin(), got.end());
                entry = to;
                at += count;
            }
            ASSERT_TRUE(sameBits(whole.gate, answers)) << nameOf(whole);
            const auto entryOf = [&](const std::vector<float>& states, int64_t floats, int32_t which) {
                return std::vector<float>(states.begin() + which * floats, states.begin() + (which + 1) * floats);
            };
            EXPECT_TRUE(sameBits(entryOf(whole.matrixStates, shape.matrixFloats(), 0),
                                 entryOf(piece.matrixStates, shape.matrixFloats(), entry)));
            EXPECT_TRUE(sameBits(entryOf(whole.convStates, shape.convFloats(), 0),
                                 entryOf(piece.convStates, shape.convFloats(), entry)));
        }
    }
}

// All sequences in one step, in steps of a few sequences, and captured with a list that has more room, by either way.
TEST_F(Mamba, ManySequences) {
    for (const MambaShape& shape : {kShapes[0], kShapes[2], kShapes[5], kShapes[9]}) {
        for (const int64_t rows : {64, 200}) {
            MambaWorld w = world(shape, manyParts(rows));
            const DeviceMamba one(w), slices(w), captured(w), scanned(w);
            const auto sequences = static_cast<int64_t>(w.list.begin.size());
            const DeviceArray<uint8_t> scratch = zeros(sequences + 5, shape);
            stepMamba(stream(), one.inputs, one.parameters, shape, one.states, one.batch, scratch.get());
            for (int64_t first = 0; first < sequences;) {
                const int64_t count = std::min<int64_t>(sequences - first, 1 + static_cast<int64_t>(random()() % 5));
                DeltaBatch batch = slices.batch;
                batch.sequences.begin += first, batch.sequences.end += first, batch.sequences.count = count;
                batch.rows = 0;
                for (int64_t s = first; s < first + count; ++s)
                    batch.rows += w.list.end[static_cast<size_t>(s)] - w.list.begin[static_cast<size_t>(s)];
                stepMamba(stream(), slices.inputs, slices.parameters, shape, slices.states, batch, scratch.get());
                first += count;
            }
            std::vector<int32_t> begin = w.list.begin, end = w.list.end;
            begin.resize(begin.size() + 5, 0), end.resize(begin.size(), 0);
            const DeviceArray<int32_t> paddedBegin(begin), paddedEnd(end);
            const auto padded = [&](DeltaBatch batch) {
                batch.sequences = {paddedBegin.get(), paddedEnd.get(), static_cast<int64_t>(begin.size())};
                return batch;
            };
            const auto graph = stream().capture([&] {
                stepMamba(stream(), captured.inputs, captured.parameters, shape, captured.states,
                          padded(captured.batch), scratch.get());
                rowAfterRow(scanned, shape, padded(scanned.batch));
            });
            stream().replay(*graph);
            stream().synchronize();
            w.useCpu();
            expectSame(w, one, "one step");
            expectSame(w, slices, "several steps");
            expectSame(w, captured, "captured");
            expectSame(w, scanned, "row after row, captured");
        }
    }
}

// Layers in close succession, with states that every pass overwrites. A block that starts late must not read what
// another one has written, and all layers use the same counters.
TEST_F(Mamba, StepsLayerAfterLayerInPlace) {
    const MambaShape shape = {32, 2, 64, 128, 4};
    const size_t layers = 6, passes = 8;
    std::vector<MambaWorld> worlds;
    const DeviceArray<uint8_t> scratch = zeros(2, shape);
    for (size_t pass = 0; pass < passes; ++pass) {
        std::vector<std::unique_ptr<DeviceMamba>> devices;
        for (size_t layer = 0; layer < layers; ++layer) {
            MambaWorld w = world(shape, {{1, {{1, 1}}}});
            if (pass > 0) w.convStates = worlds[layer].convStates, w.matrixStates = worlds[layer].matrixStates;
            if (pass > 0) worlds[layer] = w;
            else worlds.push_back(w);
            devices.push_back(std::make_unique<DeviceMamba>(w));
        }
        for (const auto& d : devices)
            stepMamba(stream(), d->inputs, d->parameters, shape, d->states, d->batch, scratch.get());
        for (size_t layer = 0; layer < layers; ++layer) {
            worlds[layer].useCpu();
            expectSame(worlds[layer], *devices[layer], "pass " + std::to_string(pass));
        }
    }
}

class MambaChunks : public Mamba {
protected:
    // In tiles of 64 rows, or cut anywhere.
    void scanInChunks(const MambaWorld& w, const DeviceMamba& device, bool whole) {
        std::vector<int32_t> begins, ends;
        for (const auto& [first, last] : tilesOf(w.list, random(), whole))
            begins.push_back(first), ends.push_back(last);
        const DeviceArray<int32_t> begin(begins), end(ends);
        const auto count = static_cast<int64_t>(begins.size());
        // What is not written must not matter.
        const DeviceArray<uint8_t> scratch(
            std::vector<uint8_t>(mambaChunkBytes(w.list.rows, count, w.shape), uint8_t{0xff}));
        scanMambaInChunks(stream(), device.inputs, device.parameters, w.shape, device.states, device.batch,
                          {begin.get(), end.get(), count}, scratch.get());
        stream().synchronize();
    }

    // Begins with what prepareMamba made. decays: of the first heads, if they are not as they come.
    void compare(const MambaShape& shape, const std::vector<Part>& parts, bool whole,
                 const std::vector<float>& decays = {}) {
        MambaWorld w = world(shape, parts);
        for (size_t i = 0; i < w.steps.size(); ++i) {
            const size_t head = i % static_cast<size_t>(shape.heads);
            w.steps[i] = mambaStep(w.steps[i], w.stepBias[head]);
            w.decays[i] = head < decays.size() ? decays[head] : mambaDecay(w.steps[i], w.rate[head]);
        }
        const DeviceMamba device(w);
        scanInChunks(w, device, whole);
        std::vector<double> states;
        const std::vector<double> expected = w.scanInDouble(states);
        const std::string what = nameOf(w) + (whole ? ", whole tiles" : ", tiles cut anywhere");
        const auto heads = static_cast<size_t>(shape.heads), columns = static_cast<size_t>(shape.headDim);
        EXPECT_LT(errorOf(expected, device.gate.read(), heads, columns), 5e-5) << what;
        EXPECT_LT(errorOf(states, device.matrixStates.read(), heads, columns * static_cast<size_t>(shape.stateDim)),
                  5e-5)
            << what << ", states";
        EXPECT_TRUE(sameBits(w.mixed, device.mixed.read())) << what;
    }
};

TEST_F(MambaChunks, AreNearDoublePrecision) {
    const std::vector<Part> one = {{2, {{130, 2}}}};
    for (const MambaShape& shape : kShapes) {
        if (shape.heads > 8) continue;
        compare(shape, kTiledParts, true);
        compare(shape, kTiledParts, false);
        compare(shape, one, true);
    }
    compare({16, 1, 64, 128, 4}, one, true);
    // Enough heads that a block takes more columns of each.
    compare({68, 4, 64, 128, 4}, one, true);
}

// At each row heads forget everything, nearly everything, nothing, nearly nothing, most, and whatever comes.
TEST_F(MambaChunks, AreNearWithAnyDecays) {
    for (const bool whole : {true, false})
        compare({6, 2, 16, 24, 4}, kTiledParts, whole, {0.0f, 1e-30f, 1.0f, 0.9999f, 1e-4f});
}

// A sequence alone gets the same bits as among many. With many, a block takes more columns of each head.
TEST_F(MambaChunks, BitsDoNotDependOnOtherSequences) {
    constexpr int64_t kRows = 70, kOthers = 16;
    for (const MambaShape& shape : {MambaShape{4, 2, 64, 128, 4}, MambaShape{2, 1, 64, 24, 4}}) {
        MambaWorld alone = world(shape, {{-1, {{kRows, 0}}}});
        alone.decays = randomFloats(alone.steps.size());
        for (float& decay : alone.decays) decay = std::exp(-std::abs(decay));
        std::vector<Part> parts;
        for (int32_t s = 0; s <= kOthers; ++s) parts.push_back({-1, {{kRows, s}}});
        MambaWorld all = world(shape, parts);
        all.skip = alone.skip;
        all.decays.assign(all.steps.size(), 0.5f);
        const auto put = [](const std::vector<float>& from, std::vector<float>& to) {
            std::copy(from.begin(), from.end(), to.end() - static_cast<std::ptrdiff_t>(from.size()));
        };
        put(alone.mixed, all.mixed), put(alone.gate, all.gate), put(alone.steps, all.steps);
        put(alone.decays, all.decays);
        const DeviceMamba one(alone), many(all);
        scanInChunks(alone, one, true), scanInChunks(all, many, true);
        const auto lastOf = [](const std::vector<float>& x, size_t count) {
            return std::vector<float>(x.end() - static_cast<std::ptrdiff_t>(count), x.end());
        };
        EXPECT_TRUE(sameBits(one.gate.read(), lastOf(many.gate.read(), alone.gate.size()))) << nameOf(alone);
        std::vector<float> first = one.matrixStates.read();
        first.resize(static_cast<size_t>(shape.matrixFloats()));
        EXPECT_TRUE(sameBits(first, lastOf(many.matrixStates.read(), first.size()))) << nameOf(alone);
    }
}

// Every form must be what convertRows, which has its own tests, makes of the CPU's floats.
TEST_F(Mamba, NormsEachGroupInEveryForm) {
    for (const MambaShape& shape : kShapes) {
        for (const int64_t rows : {1, 3, 64, 300}) {
            MambaWorld w = world(shape, {{-1, {{rows, 0}}}});
            const DeviceMamba device(w);
            const DeviceArray<float> floats(w.gate.size());
            const DeviceArray<uint16_t> hi(w.gate.size()), lo(w.gate.size()), otherHi(hi.size()), otherLo(lo.size());
            const bool blocks = shape.width() % 32 == 0;
            const DeviceArray<uint8_t> quantized(blocks ? quantizedRowsBytes(rows, shape.width()) : 0),
                other(quantized.size());
            const auto over = [&](const DeviceArray<uint8_t>& buffer) {
                return blocks ? rowsWithColumns(buffer, rows, shape.width()) : QuantizedRows();
            };
            normMamba(stream(), device.gate.get(), device.parameters, shape, rows,
                      {floats.get(), over(quantized), {hi.get(), lo.get()}});
            const std::vector<float> expected = w.normed();
            ASSERT_TRUE(sameBits(expected, floats.read())) << nameOf(w);
            const DeviceArray<float> x(expected);
            convertRows(stream(), x.get(), rows, shape.width(), {nullptr, over(other), {otherHi.get(), otherLo.get()}});
            EXPECT_EQ(other.read(), quantized.read()) << nameOf(w);
            EXPECT_EQ(otherHi.read(), hi.read()) << nameOf(w);
            EXPECT_EQ(otherLo.read(), lo.read()) << nameOf(w);
            normMamba(stream(), device.gate.get(), device.parameters, shape, rows, {device.gate.get(), {}, {}});
            EXPECT_TRUE(sameBits(expected, device.gate.read())) << nameOf(w) << ", in place";
        }
    }
}

TEST_F(Mamba, WithoutANormRowsStayAsTheyAre) {
    for (const MambaShape& shape : kShapes) {
        const int64_t rows = 3;
        const MambaWorld w = world(shape, {{-1, {{rows, 0}}}});
        DeviceMamba device(w);
        device.parameters.norm = nullptr;
        const bool blocks = shape.width() % 32 == 0;
        const DeviceArray<float> floats(w.gate.size());
        const DeviceArray<uint8_t> quantized(blocks ? quantizedRowsBytes(rows, shape.width()) : 0),
            other(quantized.size());
        const auto over = [&](const DeviceArray<uint8_t>& buffer) {
            return blocks ? rowsWithColumns(buffer, rows, shape.width()) : QuantizedRows();
        };
        normMamba(stream(), device.gate.get(), device.parameters, shape, rows, {floats.get(), over(quantized), {}});
        EXPECT_TRUE(sameBits(w.gate, floats.read())) << nameOf(w);
        convertRows(stream(), device.gate.get(), rows, shape.width(), {nullptr, over(other), {}});
        EXPECT_EQ(other.read(), quantized.read()) << nameOf(w);
    }
}

}  // namespace
}  // namespace sharpi::cuda
