// Experts in a file, and slots in RAM for some of them: a model that is larger than RAM.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "experts/ram_experts.h"
#include "memory/host_memory.h"
#include "temporary_folder.h"

namespace ondisk {

using namespace sharpi;

// A layer's stacks, of which the file gets the bytes.
class DiskWorld {
public:
    // layers: their stacks, with the bytes in memory. Each begins somewhere in a block of the file.
    explicit DiskWorld(const std::vector<ExpertStacks>& layers) {
        std::vector<uint8_t> content(77);
        std::vector<std::array<size_t, 3>> places;
        for (const ExpertStacks& layer : layers) {
            places.emplace_back();
            for (size_t i = 0; i < 3; ++i) {
                const MatrixStack& stack = *stacksOf(layer)[i];
                places.back()[i] = content.size();
                if (stack.count == 0) continue;
                const uint8_t* const bytes = stack.first.data;
                content.insert(content.end(), bytes, bytes + stack.stride * static_cast<size_t>(stack.count));
                content.resize(content.size() + 33);
            }
        }
        std::ofstream(path(), std::ios::binary)
            .write(reinterpret_cast<const char*>(content.data()), static_cast<std::streamsize>(content.size()));
        _mapped.emplace_back(path());
        reader.emplace(_mapped);
        for (size_t l = 0; l < layers.size(); ++l) {
            ExpertStacks inFile = layers[l];
            const std::array<MatrixStack*, 3> stacks{&inFile.gate, &inFile.up, &inFile.down};
            for (size_t i = 0; i < 3; ++i) {
                if (stacks[i]->count > 0) stacks[i]->first.data = _mapped[0].data() + places[l][i];
            }
            file.push_back(inFile);
            slots.addLayer(inFile);
        }
        ram.emplace(slots, *reader, nullptr);
    }
    std::string path() const { return _folder.path() + "/weights"; }
    // Takes slots for this many experts, besides the landing slots. All layers must have experts of the same size.
    void take(size_t experts) {
        size_t bytes = 0;
        for (const MatrixStack* stack : stacksOf(file[0]))
            bytes += Allocator::aligned(stack->count > 0 ? FileReader::roomFor(fileBytes(stack->first)) : 0);
        for (size_t budget = experts * bytes;; budget += bytes) {
            ExpertSlotManager tried(_allocator, ramSlotLayout());
            for (const ExpertStacks& layer : file) tried.addLayer(layer);
            tried.take(budget, nullptr);
            if (tried.capacity() < static_cast<int64_t>(experts)) continue;
            slots.take(budget, nullptr);
            return;
        }
    }
    // The pairs that each expert of a layer has, as RamExperts wants them.
    std::vector<int32_t> begins(int32_t layer, const std::vector<int32_t>& chosen) const {
        std::vector<int32_t> begin(static_cast<size_t>(file[static_cast<size_t>(layer)].gate.count) + 1);
        for (const int32_t expert : chosen) ++begin[static_cast<size_t>(expert) + 1];
        for (size_t e = 0; e + 1 < begin.size(); ++e) begin[e + 1] += begin[e];
        return begin;
    }
    // Whether an expert's matrices at hand have the file's bytes.
    void expectRead(int32_t layer, int32_t expert) {
        for (size_t which = 0; which < 3; ++which) {
            ram->await(expert, which);
            EXPECT_TRUE(ram->arrived(expert, which));
            expectBytes(layer, expert, which, ram->matrix(expert, which).data);
        }
    }
    void expectBytes(int32_t layer, int32_t expert, size_t which, const uint8_t* at) const {
        const MatrixStack& stack = *stacksOf(file[static_cast<size_t>(layer)])[which];
        if (stack.count == 0) return;
        ASSERT_NE(at, nullptr);
        EXPECT_EQ(std::memcmp(at, stack.at(expert).data, fileBytes(stack.first)), 0)
            << "layer " << layer << ", expert " << expert << ", matrix " << which;
    }
    static std::array<const MatrixStack*, 3> stacksOf(const ExpertStacks& layer) {
        return {&layer.gate, &layer.up, &layer.down};
    }

private:
    TemporaryFolder _folder;
    std::vector<MappedFile> _mapped;
    HostMemory _memory;
    Allocator _allocator{_memory};

public:
    std::vector<ExpertStacks> file;  // with addresses in the mapped file
    ExpertSlotManager slots{_allocator, ramSlotLayout()};
    std::optional<FileReader> reader;
    std::optional<RamExperts> ram;
};

}  // namespace ondisk
