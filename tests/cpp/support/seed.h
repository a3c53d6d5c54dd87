// The seeds of random tests. Each is a constant, so that a test draws the same numbers every time. SHARPI_TEST_SEED=N
// draws other numbers in all tests. A test that fails says which seed it used. And how often long random tests run.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iostream>

namespace sharpi {

class SeedTeller : public testing::EmptyTestEventListener {
public:
    static const char* wanted() {
        const char* value = std::getenv("SHARPI_TEST_SEED");
        return value && *value ? value : nullptr;
    }
    std::atomic<bool> drew{false};  // tests may draw numbers in several threads

private:
    void OnTestStart(const testing::TestInfo&) override { drew = false; }
    void OnTestEnd(const testing::TestInfo& test) override {
        if (!drew || !test.result()->Failed()) return;
        if (wanted()) std::cout << "SHARPI_TEST_SEED=" << wanted() << " draws these numbers again" << std::endl;
        else std::cout << "it draws these numbers every time; SHARPI_TEST_SEED=N draws others" << std::endl;
    }
};

inline SeedTeller& seedTeller() {
    static SeedTeller* const teller = [] {
        auto* made = new SeedTeller;  // GoogleTest owns it
        testing::UnitTest::GetInstance()->listeners().Append(made);
        return made;
    }();
    return *teller;
}
inline const bool seedsAreTold = (seedTeller(), true);  // before the first test starts

// usual: the generator's own seed, which differs from those of the test's other generators.
inline uint32_t testSeed(uint32_t usual) {
    seedTeller().drew = true;
    const char* value = SeedTeller::wanted();
    return value ? static_cast<uint32_t>(std::strtoul(value, nullptr, 10)) ^ (usual * 2654435761u) : usual;
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif
#else
constexpr bool kIsSanitized = false;
#endif

// Of so many runs of a long test, those that a sanitizer watches. It looks for wrong accesses and races, which a part
// of the runs shows; whether answers are right is tested without it.
constexpr int64_t watchedRuns(int64_t runs) { return kIsSanitized ? (runs + 1) / 2 : runs; }

}  // namespace sharpi
