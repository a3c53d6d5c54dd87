// Random tests: one seed for all that a test draws, which a test that fails prints. SHARPI_TEST_SEED draws other numbers, or those of a
// failure again.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace sharpi {

// Where it is not set, the same numbers are drawn each time.
inline uint32_t testSeed(uint32_t usual = 1) {
    const char* value = std::getenv("SHARPI_TEST_SEED");
    return value && *value ? static_cast<uint32_t>(std::strtoul(value, nullptr, 10)) : usual;
}

class SeededTest : public testing::Test {
protected:
    ~SeededTest() override {
        if (HasFailure()) std::cout << "SHARPI_TEST_SEED=" << seed() << " draws these numbers again" << std::endl;
    }
    static uint32_t seed() { return testSeed(); }
};

}  // namespace sharpi
