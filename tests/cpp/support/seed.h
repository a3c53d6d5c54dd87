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

#ifdef SHARPI_SANITIZED
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// How often a long test runs: under a sanitizer, half as often as usual. A sanitizer looks for invalid accesses and
// races, and finds them in fewer runs.
constexpr int watchedRuns(int usual) { return kSanitized ? (usual + 1) / 2 : usual; }

}  // namespace sharpi
