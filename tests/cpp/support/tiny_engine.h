// Makes engines over tiny models, in the CPU's memory or a device's, and gets answers from them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "cpu/cpu_backend.h"
#include "cpu/cpu_kind.h"
#include "engine/session.h"
#include "fake_device.h"
#include "plan/cuda_kind.h"
#include "tiny_model.h"

namespace tiny {

inline std::vector<int32_t> randomTokens(int64_t count, int64_t vocab, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> tokens(count);
    for (auto& token : tokens) token = static_cast<int32_t>(random() % vocab);
    return tokens;
}

inline std::shared_ptr<sharpi::Engine> makeEngine(const Model& model, int64_t context, int64_t batch, int threads,
                                                  sharpi::KvType kv = sharpi::KvType::BF16) {
    sharpi::EngineOptions options(sharpi::cpuKind());
    options.context = context;
    options.batch = batch;
    options.threads = threads;
    options.kvType = kv;
    return std::make_shared<sharpi::Engine>(model.spec(), model.weights(), options);
}

const float kPoison = std::numeric_limits<float>::quiet_NaN();

inline std::vector<float> evaluate(sharpi::Session& session, const std::vector<int32_t>& tokens, int64_t vocab,
                                   const std::vector<int64_t>& chunks = {},
                                   sharpi::RowKind kind = sharpi::RowKind::Prompt) {
    std::vector<float> logits(tokens.size() * vocab, kPoison);
    session.evaluate(tokens, kind, logits.data(), chunks, nullptr);
    return logits;
}

// Logits must be finite and differ between rows, or else equality between runs would prove nothing.
inline void expectMeaningful(const std::vector<float>& logits, int64_t vocab) {
    for (const float value : logits) ASSERT_TRUE(std::isfinite(value));
    const size_t rows = logits.size() / vocab;
    ASSERT_NE(std::memcmp(&logits[0], &logits[(rows - 1) * vocab], vocab * sizeof(float)), 0);
    const auto [low, high] = std::minmax_element(logits.begin(), logits.end());
    EXPECT_GT(*high - *low, 0.1f);
}

inline bool sameBits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <typename Call> void expectError(sharpi::ErrorKind kind, const std::string& part, const Call& call) {
    try {
        call();
        FAIL() << "no error about " << part;
    } catch (const sharpi::Error& e) {
        EXPECT_EQ(e.kind(), kind) << e.what();
        EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
}

inline std::vector<int32_t> greedy(sharpi::Session& session, const std::vector<int32_t>& prompt, int count) {
    sharpi::SamplingParams params;
    params.temperature = 0;
    session.start(prompt, params, nullptr);
    std::vector<int32_t> made;
    while (static_cast<int>(made.size()) < count) {
        const auto token = session.next();
        if (!token) break;
        made.push_back(*token);
    }
    return made;
}

// A backend with device memory of its own, like a GPU's, which here is host memory.
struct OnFake {
    explicit OnFake(size_t capacity, size_t granularity = size_t{16} << 10)
        : memory(std::make_unique<sharpi::FakeDevice>(capacity, granularity)), device(*memory) {}
    std::shared_ptr<sharpi::Engine> load(const Model& model, const sharpi::EngineOptions& options) {
        return std::make_shared<sharpi::Engine>(model.spec(), model.weights(), options,
                                                std::make_unique<sharpi::CpuBackend>(1, std::move(memory)));
    }
    std::unique_ptr<sharpi::FakeDevice> memory;
    sharpi::FakeDevice& device;
};

inline sharpi::EngineOptions smallOptions() {
    sharpi::EngineOptions options(sharpi::cpuKind());
    options.context = 200;
    options.batch = 16;
    return options;
}

// A device that outlives its engine, so that tests see what the engine gives back.
struct Borrowed : sharpi::DeviceMemory {
    explicit Borrowed(sharpi::FakeDevice& d) : device(d) {}
    std::string name() const override { return device.name(); }
    size_t granularity() const override { return device.granularity(); }
    size_t freeBytes() const override { return device.freeBytes(); }
    void* reserve(size_t bytes) override { return device.reserve(bytes); }
    void release(void* address, size_t bytes) noexcept override { device.release(address, bytes); }
    bool commit(void* address, size_t bytes) override {
        if (beforeCommit && !beforeCommit()) return false;
        return device.commit(address, bytes);
    }
    void decommit(void* address, size_t bytes) noexcept override { device.decommit(address, bytes); }
    void upload(void* to, const void* host, size_t bytes) override { device.upload(to, host, bytes); }
    void download(void* host, const void* from, size_t bytes) override { device.download(host, from, bytes); }
    void zero(void* address, size_t bytes) override { device.zero(address, bytes); }
    sharpi::FakeDevice& device;
    std::function<bool()> beforeCommit;  // false: refuse
};

}  // namespace tiny
