// The CPU's part of a layer of experts in a GPU step. Whatever the types, choices, rows and threads, and whatever the
// GPU has or fetches: for each pair that the CPU computes, the mailbox gets the bits of that pair computed by itself,
// and for other pairs nothing. A thread plays the GPU. Meant to be run under ThreadSanitizer too.
#include "disk_world.h"
#include "host_experts_world.h"
#include "seed.h"

using namespace sharpi;
using namespace steptest;

namespace {

const Shape kShapes[] = {
    {DType::Q4_K, DType::Q4_K, DType::Q6_K, 256, 512, 16, 8},
    {DType::Q8_0, DType::Q4_0, DType::Q5_1, 160, 352, 5, 2},  // rows that end within a group of 8 blocks
    {DType::Q4_K, DType::Q6_K, DType::F16, 256, 288, 9, 8},
    {DType::F16, DType::Q8_0, DType::Q4_0, 96, 320, 12, 1},
    {DType::BF16, DType::F32, DType::Q8_0, 96, 32, 8, 8},   // one block
    {DType::F32, DType::BF16, DType::F16, 100, 333, 7, 2},  // rows that have no quantized form
};

constexpr Activation kGelu = {ActivationKind::Gelu}, kClamped = {ActivationKind::ClampedSwiglu, 1.5f},
                     kSquared = {ActivationKind::ReluSquared};

constexpr Share kNothingThere = {0, 0}, kAllThere = {1, 0}, kAllFetched = {0, 1}, kMixed = {0.4, 0.4};

bool refusesAsInternal(const std::function<void()>& body) {
    try {
        body();
    } catch (const Error& e) {
        return e.kind() == ErrorKind::Internal;
    }
    return false;
}

TEST(HostExperts, EveryPairThatIsMissedHasTheBitsOfItself) {
    std::mt19937 random(sharpi::testSeed(21));
    for (const Shape& shape : kShapes) {
        for (const int64_t rows : {1, 3, 8, 9, 40, 64}) {
            SCOPED_TRACE(nameOf(shape) + ", " + std::to_string(rows) + " rows");
            std::vector<Layer> layers;
            for (const Share share : {kNothingThere, kMixed, Share{0.8, 0}, Share{0, 0.5}}) {
                layers.emplace_back(shape, rows, Routing::Random, share, random);
            }
            runLayers({shape}, 3, layers);
            if (HasFailure()) return;
        }
    }
}

TEST(HostExperts, WithBiasesOtherActivationsAndWeightedInputs) {
    std::mt19937 random(sharpi::testSeed(33));
    for (const Shape& shape : {Shape{DType::MXFP4, DType::MXFP4, DType::MXFP4, 96, 352, 6, 4, kClamped, true, false},
                               Shape{DType::Q4_K, DType::Q8_0, DType::F16, 256, 288, 5, 2, kGelu, false, false},
                               Shape{DType::F32, DType::F32, DType::F32, 100, 333, 4, 1, {}, false, true},
                               Shape{DType::Q8_0, DType::Q8_0, DType::Q8_0, 64, 96, 3, 3, kGelu, true, true},
                               Shape{DType::Q8_0, DType::Q8_0, DType::Q8_0, 64, 96, 1, 1, kClamped, true, false},
                               Shape{DType::Q4_K, DType::F32, DType::Q8_0, 256, 96, 5, 2, kSquared, true, true, false},
                               Shape{DType::F16, DType::F32, DType::F16, 64, 99, 4, 2, kGelu, false, false, false}}) {
        for (const int64_t rows : {1, 4, 40}) {
            SCOPED_TRACE(nameOf(shape) + ", " + std::to_string(rows) + " rows");
            std::vector<Layer> layers;
            for (const Share share : {kNothingThere, kMixed})
                layers.emplace_back(shape, rows, Routing::Random, share, random);
            runLayers({shape}, 3, layers);
            if (HasFailure()) return;
        }
    }
}

// Of a model that is larger than RAM: whether experts are in RAM or come from the disk, in whatever order.
TEST(HostExperts, ThatAreOnTheDiskAreComputedAsTheyCome) {
    std::mt19937 random(sharpi::testSeed(38));
    for (const Shape& shape :
         {kShapes[0], kShapes[4],
          Shape{DType::Q4_K, DType::F32, DType::Q8_0, 256, 96, 5, 2, kSquared, true, true, false}}) {
        std::vector<Layer> layers;
        for (const int64_t rows : {1, 8, 40})
            for (const Share share : {kNothingThere, Share{0.5, 0}})
                layers.emplace_back(shape, rows, Routing::Random, share, random);
        std::vector<ExpertStacks> stacks;
        for (const Layer& layer : layers) stacks.push_back(layer.file());
        ondisk::DiskWorld disk(stacks);
        disk.take(2 * static_cast<size_t>(shape.experts));
        for (Layer& layer : layers) layer.ram = &*disk.ram;
        Desk desk({shape}, layers.size(), 3, [] { return false; });
        for (int step = 0; step < 4; ++step) {
            SCOPED_TRACE(nameOf(shape) + ", step " + std::to_string(step));
            disk.ram->beginPass(1);
            desk.beginStep();
            for (size_t i = 0; i < layers.size(); ++i) {
                desk.poison();
                desk.pass(layers[i], static_cast<int32_t>(i));
                desk.expectAnswers(layers[i]);
                if (HasFailure()) return;
            }
        }
        EXPECT_GT(disk.ram->counts().hits, 0u);
        EXPECT_GT(disk.ram->counts().reads, 0u);
        // A file that was cut: the step ends in an error, which names it.
        ASSERT_EQ(::truncate(disk.path().c_str(), 10), 0);
        std::string failure;
        for (int step = 0; step < 4 && failure.empty(); ++step) {
            disk.ram->beginPass(1);
            desk.beginStep();
            try {
                for (size_t i = 0; i < layers.size(); ++i) desk.pass(layers[i], static_cast<int32_t>(i));
            } catch (const Error& error) {
                failure = error.what();
                disk.ram->passFailed();
            }
        }
        EXPECT_NE(failure.find("cannot be read"), std::string::npos);
    }
}

// Latents: the rows of the model are wider than those that experts read and give.
TEST(HostExperts, MayReadNarrowerRowsThanTheModelHas) {
    std::mt19937 random(sharpi::testSeed(37));
    for (const Shape& shape : kShapes) {
        if (shape.experts == 1) continue;
        for (const int64_t rows : {1, 5}) {
            SCOPED_TRACE(nameOf(shape) + ", " + std::to_string(rows) + " rows");
            StepLimits limits = limitsOf({shape}, 1);
            limits.expertLatents = shape.embedding;
            limits.embedding = shape.embedding + 96;
            const Layer layer(shape, rows, Routing::Random, kNothingThere, random);
            Desk desk(limits, 2, [] { return false; });
            EXPECT_EQ(desk.mailbox().input.cols, shape.embedding + 96);
            desk.beginStep();
            desk.pass(layer, 0);
            desk.expectAnswers(layer);
            if (HasFailure()) return;
        }
    }
}

TEST(HostExperts, OfEveryType) {
    std::mt19937 random(sharpi::testSeed(31));
    std::vector<DType> types = reference::quantizedTypes();
    types.insert(types.end(), {DType::F32, DType::F16, DType::BF16});
    for (size_t i = 0; i < types.size(); ++i) {
        const Shape shape = {types[i], types[(i + 1) % types.size()], types[(i + 5) % types.size()], 256, 256, 6, 3};
        SCOPED_TRACE(nameOf(shape));
        std::vector<Layer> layers;
        for (const int64_t rows : {1, 5}) layers.emplace_back(shape, rows, Routing::Random, Share{0.3, 0.3}, random);
        layers.emplace_back(shape, 2, Routing::Same, kNothingThere, random);
        runLayers({shape}, 2, layers);
        if (HasFailure()) return;
    }
}

TEST(HostExperts, RowsMayChooseTheSameExpertsAndOneMoreThanOnce) {
    std::mt19937 random(sharpi::testSeed(22));
    for (const Shape& shape : kShapes) {
        for (const int64_t rows : {2, 8, 40}) {
            SCOPED_TRACE(nameOf(shape) + ", " + std::to_string(rows) + " rows");
            std::vector<Layer> layers;
            for (const Routing choice : {Routing::Same, Routing::Twice}) {
                for (const Share share : {kNothingThere, kMixed})
                    layers.emplace_back(shape, rows, choice, share, random);
            }
            runLayers({shape}, 2, layers);
            if (HasFailure()) return;
        }
    }
}

// If nothing is missed the GPU does not wait, and if all is fetched it waits for orders alone; the CPU comes behind.
TEST(HostExperts, TheGpuMayBeLayersAhead) {
    std::mt19937 random(sharpi::testSeed(32));
    const Shape& shape = kShapes[1];
    for (const int64_t rows : {1, 4}) {
        std::vector<Layer> layers;
        for (int i = 0; i < 40; ++i) {
            const Share share = i % 9 == 8 ? kNothingThere : i % 5 == 4 ? kAllFetched : kAllThere;
            layers.emplace_back(shape, rows, Routing::Random, share, random);
            ASSERT_EQ(layers.back().ours.empty(), i % 9 != 8);
        }
        runLayers({shape}, 2, layers);
    }
}

TEST(HostExperts, AnyNumberOfThreadsGivesTheSameBits) {
    std::mt19937 random(sharpi::testSeed(23));
    for (const Shape& shape : {kShapes[0], kShapes[5]}) {
        std::vector<Layer> layers;
        layers.emplace_back(shape, 5, Routing::Random, Share{0.3, 0.2}, random);
        layers.emplace_back(shape, 5, Routing::Same, kNothingThere, random);
        for (int threads = 1; threads <= 16; ++threads) {
            SCOPED_TRACE(nameOf(shape) + ", " + std::to_string(threads) + " threads");
            runLayers({shape}, threads, layers);
            if (HasFailure()) return;
        }
    }
}

TEST(HostExperts, LayersOfManyKindsInARow) {
    std::mt19937 random(sharpi::testSeed(24));
    const std::vector<Shape> shapes = {
        {DType::Q4_K, DType::Q4_K, DType::Q6_K, 256, 512, 6, 4},
        {DType::Q8_0, DType::Q8_0, DType::Q8_0, 256, 1056, 1, 1},
        {DType::Q4_0, DType::Q5_0, DType::Q4_1, 256, 96, 20, 3},
        {DType::Q6_K, DType::BF16, DType::F32, 256, 45, 3, 2},
        {DType::IQ4_XS, DType::MXFP4, DType::Q8_0, 256, 288, 8, 4},
        {DType::IQ2_XXS, DType::IQ1_M, DType::IQ3_S, 256, 512, 8, 4},
        {DType::NVFP4, DType::TQ1_0, DType::NVFP4, 256, 320, 6, 2},
    };
    const Share shares[] = {kNothingThere, kAllThere, kAllFetched, kMixed, kMixed};
    for (const int64_t rows : {1, 4}) {
        std::vector<Layer> layers;
        for (int i = 0; i < 40; ++i) {
            layers.emplace_back(shapes[random() % shapes.size()], rows, Routing::Random,
                                shares[random() % std::size(shares)], random);
        }
        runLayers(shapes, 3, layers);
        if (HasFailure()) return;
    }
}

TEST(HostExperts, HiddenRowsMayBeMuchWiderThanTheEmbedding) {
    std::mt19937 random(sharpi::testSeed(29));
    const Shape shape = {DType::Q4_0, DType::Q8_0, DType::Q6_K, 256, 6144, 2, 2};
    std::vector<Layer> layers;
    layers.emplace_back(shape, 5, Routing::Same, kNothingThere, random);
    // Repeated, since threads whose scratch overlaps would not collide every time.
    for (int run = 0; run < 8; ++run) runLayers({shape}, 3, layers);
}

// Layers share their buffers, and the second ends within a group of blocks.
TEST(HostExperts, ALayerOfNanLeavesNothingToTheNext) {
    std::mt19937 random(sharpi::testSeed(30));
    for (const DType type :
         {DType::Q4_0, DType::Q4_1, DType::Q5_0, DType::Q5_1, DType::Q8_0, DType::IQ4_NL, DType::MXFP4}) {
        const Shape wide = {DType::Q4_K, DType::Q4_K, type, 256, 256, 4, 2},
                    narrow = {DType::Q4_K, DType::Q4_K, type, 256, 96, 4, 2};
        for (const int64_t rows : {1, 2, 8}) {
            SCOPED_TRACE(nameOf(narrow) + ", " + std::to_string(rows) + " rows");
            Layer overflowed(wide, rows, Routing::Same, kNothingThere, random);
            const Layer next(narrow, rows, Routing::Same, kNothingThere, random);
            for (Row& row : overflowed.input) {
                row.floats[0] = INFINITY;
                row = Row(row.floats);
            }
            Desk desk({wide, narrow}, 2, 2, nullptr);
            desk.beginStep();
            desk.pass(overflowed, 0);
            EXPECT_TRUE(std::isnan(desk.mailbox().answers[0]));
            desk.poison();
            desk.pass(next, 1);
            desk.expectAnswers(next);
        }
    }
}

TEST(HostExperts, AStepPassesWithoutTakingMemory) {
    std::mt19937 random(sharpi::testSeed(25));
    const Shape& shape = kShapes[0];
    for (const int64_t rows : {1, 8}) {
        const Layer first(shape, rows, Routing::Random, kMixed, random),
            second(shape, rows, Routing::Same, Share{0, 0.3}, random);
        Desk desk({shape}, 2, 3, nullptr);
        desk.beginStep();
        const int64_t before = allocations;
        {
            const HostShare::Awake awake(desk.share);
            desk.pass(first, 0);
            desk.poison();
            desk.pass(second, 1);
        }
        EXPECT_EQ(allocations, before);
        EXPECT_EQ(*desk.mailbox().returned, 2u);
        desk.expectAnswers(second);
    }
}

// Changing the choices meanwhile has no effect: the values that were checked are the values that are used.
TEST(HostExperts, ChoicesAreReadOnce) {
    std::mt19937 random(sharpi::testSeed(33));
    const Shape& shape = kShapes[0];
    for (int run = 0; run < 10; ++run) {
        const Layer layer(shape, 4, Routing::Random, Share{0.3, 0.1}, random);
        Desk desk({shape}, 3, 2, nullptr);
        desk.plan.meanwhile = [&] { desk.poisonChoices(); };
        desk.beginStep();
        desk.pass(layer, 2);
        desk.expectAnswers(layer);
    }
}

TEST(HostExperts, AChoiceThatIsNoExpertIsRefusedAndTheShareStaysUsable) {
    std::mt19937 random(sharpi::testSeed(26));
    const Shape& shape = kShapes[1];
    const Layer layer(shape, 3, Routing::Random, {0.5, 0.5}, random);
    Layer predicting(shape, 3, Routing::Random, kNothingThere, random);
    predicting.orders.aheadFetch[0] = predicting.fetch(0, 1);
    predicting.orders.ahead = 1;
    Desk desk({shape, {DType::F32, DType::F32, DType::F32, 160, 32, 6, 2}}, 1, 2,
              nullptr);  // another layer has an expert more
    desk.beginStep();
    for (const int32_t wrong : {-1, shape.experts + 1, INT32_MIN, INT32_MAX, shape.experts}) {
        for (const size_t at : {size_t{0}, layer.chosen.size() - 1}) {
            desk.give(layer, 0);
            desk.mailbox().choicesOf(0).chosen[at] = wrong;
            EXPECT_TRUE(refusesAsInternal([&] { desk.compute(layer, 0, 0); })) << wrong << " at " << at;
            desk.give(predicting, 0);
            if (wrong == shape.experts) continue;  // the next layer may have it
            desk.mailbox().choicesOf(0).predicted[at] = wrong;
            EXPECT_TRUE(refusesAsInternal([&] { desk.compute(predicting, 0, 0); })) << wrong << " at " << at;
        }
    }
    EXPECT_EQ(desk.plan.ordered, 0);
    EXPECT_EQ(*desk.mailbox().instructed, 0u);
    desk.expectUntouched();
    desk.beginStep();
    desk.pass(layer, 0);
    desk.expectAnswers(layer);
    EXPECT_EQ(*desk.mailbox().returned, 1u);
}

// A layer of which 6 of 8 chosen experts are missed.
struct Ordered {
    Layer layer;
    Desk desk;
    std::vector<int32_t> missed;
    int32_t found = -1, slotOfFound = -1, unchosen = -1;

    explicit Ordered(std::mt19937& random)
        : layer(kShapes[0], 1, Routing::Random, kNothingThere, random), desk({kShapes[0]}, 1, 2, nullptr) {
        for (size_t p = 0; p < 2; ++p) layer.slot[p] = 20 + static_cast<int32_t>(p), layer.ours.erase(layer.chosen[p]);
        found = layer.chosen[0], slotOfFound = layer.slot[0];
        missed.assign(layer.chosen.begin() + 2, layer.chosen.end());
        while (std::count(layer.chosen.begin(), layer.chosen.end(), ++unchosen)) continue;
        layer.orders.demanded = 3;
        for (int i = 0; i < 3; ++i) layer.orders.fetch[i] = layer.fetch(missed[static_cast<size_t>(i)], i);
        layer.orders.ahead = 2;
        for (int i = 0; i < 2; ++i) layer.orders.aheadFetch[i] = layer.fetch(i + 5, i);
        desk.beginStep();
    }
};

TEST(HostExperts, OrdersThatWouldDoHarmAreRefused) {
    std::mt19937 random(sharpi::testSeed(34));
    Ordered o(random);
    using Orders = ExpertOrders;
    const std::vector<std::pair<const char*, std::function<void(Orders&)>>> wrongs = {
        {"of an expert that is there", [&](Orders& w) { w.fetch[1].expert = o.found; }},
        {"of an expert that nobody chose", [&](Orders& w) { w.fetch[1].expert = o.unchosen; }},
        {"of no expert", [&](Orders& w) { w.fetch[2].expert = -1; }},
        {"of an expert past the last", [&](Orders& w) { w.fetch[0].expert = kShapes[0].experts; }},
        {"twice", [&](Orders& w) { w.fetch[2].expert = w.fetch[0].expert; }},
        {"two into a slot", [&](Orders& w) { w.fetch[2].slot = w.fetch[0].slot; }},
        {"into a slot that is in use", [&](Orders& w) { w.fetch[1].slot = o.slotOfFound; }},
        {"into no slot", [&](Orders& w) { w.fetch[1].slot = -1; }},
        {"without a gate", [&](Orders& w) { w.fetch[1].gate = nullptr; }},
        {"without an up", [&](Orders& w) { w.fetch[1].up = nullptr; }},
        {"without a down", [&](Orders& w) { w.fetch[1].down = nullptr; }},
        {"fewer than none", [&](Orders& w) { w.demanded = -1; }},
        {"more than there is room for", [&](Orders& w) { w.demanded = kMaxExpertFetches + 1; }},
        {"fewer than none ahead", [&](Orders& w) { w.ahead = -1; }},
        {"more ahead than there is room for", [&](Orders& w) { w.ahead = kMaxFetchesAhead + 1; }},
        {"ahead of no expert", [&](Orders& w) { w.aheadFetch[1].expert = -1; }},
        {"ahead of an expert past the last", [&](Orders& w) { w.aheadFetch[1].expert = kShapes[0].experts; }},
        {"ahead twice", [&](Orders& w) { w.aheadFetch[1].expert = w.aheadFetch[0].expert; }},
        {"ahead, two into a slot", [&](Orders& w) { w.aheadFetch[1].slot = w.aheadFetch[0].slot; }},
        {"ahead into no slot", [&](Orders& w) { w.aheadFetch[0].slot = -2; }},
        {"ahead without a down", [&](Orders& w) { w.aheadFetch[0].down = nullptr; }},
    };
    o.desk.give(o.layer, 0);
    for (const auto& [name, change] : wrongs) {
        SCOPED_TRACE(name);
        const Orders right = o.layer.orders;
        change(o.layer.orders);
        EXPECT_TRUE(refusesAsInternal([&] { o.desk.compute(o.layer, 0, 0); }));
        EXPECT_EQ(o.desk.plan.ordered, 1);
        EXPECT_EQ(o.desk.plan.told, 0);
        EXPECT_EQ(*o.desk.mailbox().instructed, 0u);
        EXPECT_TRUE(same(*o.desk.mailbox().orders, Orders{}));
        o.desk.expectUntouched();
        o.layer.orders = right;
    }
    o.desk.beginStep();
    for (int i = 0; i < 3; ++i) o.layer.ours.erase(o.missed[static_cast<size_t>(i)]);
    o.desk.compute(o.layer, 0, 0);
    o.desk.expectAnswers(o.layer);
    EXPECT_TRUE(same(*o.desk.mailbox().orders, o.layer.orders));
    EXPECT_EQ(*o.desk.mailbox().instructed, 1u);
}

TEST(HostExperts, WhatThePlanThrowsGoesThrough) {
    std::mt19937 random(sharpi::testSeed(35));
    const Layer layer(kShapes[0], 2, Routing::Random, {0.3, 0}, random);
    Desk desk({kShapes[0]}, 1, 2, nullptr);
    const Mailbox& box = desk.mailbox();
    desk.beginStep();
    desk.plan.thrown = PlayedPlan::Thrown::ByOrder;
    EXPECT_THROW(desk.pass(layer, 0), std::runtime_error);
    EXPECT_EQ(*box.instructed, 0u);
    desk.expectUntouched();
    desk.share.abort();
    EXPECT_EQ(*box.instructed, kCrossingAborted);
    EXPECT_EQ(*box.returned, kCrossingAborted);

    desk.beginStep();
    EXPECT_EQ(*box.instructed, 0u);
    EXPECT_EQ(*box.returned, 0u);
    desk.plan.thrown = PlayedPlan::Thrown::ByDone;
    EXPECT_THROW(desk.pass(layer, 0), std::runtime_error);
    EXPECT_EQ(*box.instructed, 1u);  // tickets begin again, too
    EXPECT_EQ(*box.returned, 1u);
    desk.expectAnswers(layer);
}

// The time from a layer's orders to the next layer's question counts if the CPU waited for the question and had nothing
// else to do.
TEST(HostExperts, ThePlanHearsHowLongTheGpuTook) {
    std::mt19937 random(sharpi::testSeed(36));
    const Shape shape = kShapes[0], wide = {DType::Q8_0, DType::Q8_0, DType::Q8_0, shape.embedding, 96, 1, 1};
    const Layer missed(shape, 2, Routing::Random, {0.3, 0}, random),
        there(shape, 2, Routing::Random, kAllThere, random);
    const Layer dense(wide, 2, Routing::Random, kNothingThere, random);
    uint32_t ticket = 0;
    std::optional<Desk> desk;
    // Called once the CPU waits: so it has waited when the ticket comes.
    desk.emplace(std::vector<Shape>{shape, wide}, 1, 2, [&] {
        __atomic_store_n(desk->mailbox().sent, ticket, __ATOMIC_RELEASE);
        return false;
    });
    const auto waited = [&](const Layer& layer) {
        desk->give(layer, 0);
        desk->compute(layer, 0, ++ticket);
    };
    desk->beginStep();
    waited(missed);
    EXPECT_TRUE(desk->plan.turns.empty()) << "no layer came before it";
    waited(there);
    ASSERT_EQ(desk->plan.turns.size(), 1u);
    EXPECT_GT(desk->plan.turns[0], 0);
    waited(missed);
    EXPECT_EQ(desk->plan.turns.size(), 1u) << "the layer before it had no orders";
    desk->pass(missed, 0);
    EXPECT_EQ(desk->plan.turns.size(), 1u) << "the question was there before the CPU looked";
    desk->pass(dense, 0);
    waited(missed);
    EXPECT_EQ(desk->plan.turns.size(), 1u) << "other work came between";
    desk->beginStep();
    ticket = 0;
    waited(missed);
    EXPECT_EQ(desk->plan.turns.size(), 1u) << "another step";
}

TEST(HostExperts, WaitingThatThrowsEndsTheWait) {
    std::mt19937 random(sharpi::testSeed(27));
    const Shape& shape = kShapes[3];
    const Layer layer(shape, 2, Routing::Random, kNothingThere, random);
    Desk desk({shape}, 1, 2, []() -> bool { throw std::runtime_error("the GPU is gone"); });
    desk.beginStep();
    desk.give(layer, 0);
    EXPECT_THROW(desk.compute(layer, 0, 1), std::runtime_error);
    EXPECT_EQ(desk.plan.ordered, 0);
    EXPECT_EQ(*desk.mailbox().instructed, 0u);
    desk.expectUntouched();
}

TEST(HostExperts, RefusesWhatDoesNotFitTheMailbox) {
    std::mt19937 random(sharpi::testSeed(28));
    const Shape& shape = kShapes[5];
    const Layer layer(shape, 1, Routing::Random, kNothingThere, random);
    const ExpertStacks right = layer.file();
    Desk desk({shape}, 2, 2, nullptr);
    for (int32_t i = 0; i < 2; ++i) {  // no choice is a reason
        std::fill_n(desk.mailbox().choicesOf(i).chosen, desk.mostPairs(), 0);
        desk.give(layer, i);
    }
    const auto refused = [&](const ExpertStacks& file, int32_t number, int64_t rows, int32_t used) {
        desk.plan.begin(desk.mailbox(), layer, number, 1);
        return refusesAsInternal(
            [&] { desk.share.experts({file, {}}, number, rows, used, layer.predicts(), false, desk.plan, 0, 1, 1); });
    };
    const auto changed = [&](const std::function<void(ExpertStacks&)>& change) {
        ExpertStacks stacks = right;
        change(stacks);
        return stacks;
    };
    EXPECT_TRUE(refused(right, 0, kMostRows + 1, 1));
    EXPECT_TRUE(refused(right, 0, 0, 2));
    EXPECT_TRUE(refused(right, 0, 1, 0));
    EXPECT_TRUE(refused(right, 0, kMostRows, 3));
    EXPECT_TRUE(refused(right, -1, 1, 2));
    std::fill_n(desk.mailbox().answers, desk.mostPairs() * shape.embedding,
                0.0f);  // would do as choices of a layer past the last
    EXPECT_TRUE(refused(right, 2, 1, 2));
    desk.poison();
    desk.give(layer, 1);
    const std::function<void(ExpertStacks&)> wrongs[] = {
        [](ExpertStacks& s) { ++s.gate.count, ++s.up.count, ++s.down.count; },
        [](ExpertStacks& s) { --s.down.count; },
        [](ExpertStacks& s) { s.up.first.cols = 64; },
        [](ExpertStacks& s) { s.gate.first.type = DType::Q8_0; },
        [](ExpertStacks& s) { s.down.first.type = DType::Q8_0; },
        [](ExpertStacks& s) { s.up.first.rows = 320; },
        [](ExpertStacks& s) { ++s.down.first.rows; },
        [](ExpertStacks& s) { ++s.gate.first.rows; },
    };
    for (const auto& wrong : wrongs) EXPECT_TRUE(refused(changed(wrong), 0, 1, 2)) << &wrong - wrongs;
    EXPECT_EQ(desk.plan.ordered, 0);
    desk.expectUntouched();
    EXPECT_FALSE(refused(right, 1, 1, 2));
    desk.expectAnswers(layer);
}

// All parts are filled to their last element without overlapping.
TEST(HostExperts, TheMailboxHasRoomForAllLayers) {
    const Shape& shape = kShapes[0];
    constexpr int32_t kLayers = 5;
    Desk desk({shape, {DType::Q4_K, DType::Q4_K, DType::Q4_K, 256, 512, 1, 1}}, kLayers, 1, nullptr);
    const Mailbox& box = desk.mailbox();
    const uint8_t* end = desk.memory.get() + HostShare::mailboxBytes(desk.limits, kMostRows);
    *box.orders = {};
    std::fill_n(box.hidden.floats, kMostRows * box.hidden.cols, kPoison);
    for (int32_t layer = 0; layer < kLayers; ++layer) {
        const HostChoices of = box.choicesOf(layer);
        int32_t value = 3 * layer;
        for (int32_t* list : {of.chosen, of.slot, of.predicted}) std::fill_n(list, desk.mostPairs(), value++);
        std::fill_n(of.weight, desk.mostPairs(), 0.25f * static_cast<float>(layer));
    }
    for (int32_t layer = 0; layer < kLayers; ++layer) {
        const HostChoices of = box.choicesOf(layer);
        for (int64_t p = 0; p < desk.mostPairs(); ++p) {
            ASSERT_EQ(of.chosen[p], 3 * layer);
            ASSERT_EQ(of.slot[p], 3 * layer + 1);
            ASSERT_EQ(of.predicted[p], 3 * layer + 2);
            ASSERT_EQ(of.weight[p], 0.25f * static_cast<float>(layer));
        }
        EXPECT_LE(reinterpret_cast<uint8_t*>(of.weight + desk.mostPairs()), end);
    }
    EXPECT_LE(reinterpret_cast<uint8_t*>(box.answers + desk.mostPairs() * shape.embedding), end);
    EXPECT_LE(reinterpret_cast<uint8_t*>(box.orders + 1), end);
    EXPECT_TRUE(same(*box.orders, {}));
    desk.expectUntouched();
    for (int64_t i = 0; i < kMostRows * shape.embedding; ++i) ASSERT_EQ(box.down[i], kPoison);
    for (int64_t i = 0; i < kMostRows * box.hidden.cols; ++i) ASSERT_EQ(box.hidden.floats[i], kPoison);
    const uint32_t* counters[] = {box.sent, box.instructed, box.returned};
    for (const uint32_t* a : counters) {
        EXPECT_EQ(*a, 0u);
        for (const uint32_t* b : counters) EXPECT_TRUE(a == b || std::abs(a - b) >= 32) << "counters in one line";
    }
}

// A model whose experts are all resident needs no room for them.
TEST(HostExperts, WithoutLayersThereIsNoRoomForChoices) {
    StepLimits limits = limitsOf({kShapes[0]}, 0);
    const size_t without = HostShare::mailboxBytes(limits, kMostRows);
    limits.experts = limits.expertsUsed = 0;
    EXPECT_EQ(HostShare::mailboxBytes(limits, kMostRows), without);
    limits = limitsOf({kShapes[0]}, 1);
    EXPECT_GT(HostShare::mailboxBytes(limits, kMostRows), without);
}

}  // namespace
