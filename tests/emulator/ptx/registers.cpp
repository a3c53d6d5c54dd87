// PTX has a register for every value, thousands of them. A warp's file should stay in the cache, so those that are
// never alive at the same time share a place: linear scan over the text, in which a register lives from its first to
// its last use, and through all blocks that it enters or leaves alive. A lane goes its way alone as far as its
// registers are concerned, since instructions write only the lanes that execute them.
#include <algorithm>
#include <climits>
#include <cstdint>

#include "ptx/draft.h"

namespace sharpi::emulator {

namespace {

using Set = std::vector<uint64_t>;

struct Life {
    int reg, begin, end;
};

class Liveness {
public:
    explicit Liveness(const Draft& draft) : _draft(draft), _blocks(basicBlocks(*draft.kernel)) {
        const size_t wordCount = (draft.registers.size() + 63) / 64;
        _in.assign(_blocks.size(), Set(wordCount, 0));
        _out = _used = _set = _in;
        for (size_t b = 0; b < _blocks.size(); ++b) findUses(b);
        flow();
    }

    std::vector<Life> lives() const {
        std::vector<Life> lives(_draft.registers.size());
        for (size_t r = 0; r < lives.size(); ++r) lives[r] = {static_cast<int>(r), INT_MAX, -1};
        const auto touch = [&](int r, int at) {
            lives[r].begin = std::min(lives[r].begin, at);
            lives[r].end = std::max(lives[r].end, at);
        };
        for (size_t b = 0; b < _blocks.size(); ++b) {
            forEach(_in[b], [&](int r) { touch(r, 2 * _blocks[b].begin); });
            forEach(_out[b], [&](int r) { touch(r, 2 * _blocks[b].end); });
            for (int i = _blocks[b].begin; i < _blocks[b].end; ++i) {
                for (int r : _draft.uses[i].sources) touch(r, 2 * i);
                for (int r : _draft.uses[i].results) touch(r, 2 * i + 1);
            }
        }
        return lives;
    }

private:
    template <typename Body> static void forEach(const Set& set, Body body) {
        for (size_t w = 0; w < set.size(); ++w)
            for (uint64_t bits = set[w]; bits; bits &= bits - 1) body(static_cast<int>(w * 64 + __builtin_ctzll(bits)));
    }

    void findUses(size_t b) {
        const auto has = [](const Set& set, int r) { return set[r / 64] >> (r % 64) & 1; };
        const auto add = [](Set& set, int r) { set[r / 64] |= uint64_t{1} << (r % 64); };
        for (int i = _blocks[b].begin; i < _blocks[b].end; ++i) {
            for (int r : _draft.uses[i].sources)
                if (!has(_set[b], r)) add(_used[b], r);
            const bool always = _draft.kernel->code[i].guard == kNone;
            for (int r : _draft.uses[i].results) {
                if (always) add(_set[b], r);
                else if (!has(_set[b], r)) add(_used[b], r);  // keeps its value in lanes that the guard leaves out
            }
        }
    }

    void flow() {
        for (bool changed = true; changed;) {
            changed = false;
            for (size_t b = _blocks.size(); b-- > 0;) {
                for (int n : _blocks[b].next)
                    for (size_t w = 0; w < _out[b].size(); ++w) _out[b][w] |= _in[n][w];
                for (size_t w = 0; w < _out[b].size(); ++w) {
                    const uint64_t in = _used[b][w] | (_out[b][w] & ~_set[b][w]);
                    if (in != _in[b][w]) _in[b][w] = in, changed = true;
                }
            }
        }
    }

    const Draft& _draft;
    const std::vector<BasicBlock> _blocks;
    std::vector<Set> _in, _out, _used, _set;
};

}  // namespace

void placeRegisters(Draft& draft) {
    Kernel& kernel = *draft.kernel;
    std::vector<Life> lives = Liveness(draft).lives();
    std::sort(lives.begin(), lives.end(), [](const Life& a, const Life& b) { return a.begin < b.begin; });
    std::vector<int> place(draft.registers.size(), 0);
    int count[2] = {0, 0};  // of 4 and of 8 bytes
    std::vector<int> unused[2];
    std::vector<Life> alive;
    for (const Life& life : lives) {
        if (life.reg < kSpecials) {
            place[life.reg] = life.reg * kSlotBytes;
            continue;
        }
        if (life.end < 0) continue;
        for (size_t i = 0; i < alive.size();) {
            if (alive[i].end < life.begin) {
                unused[draft.registers[alive[i].reg].bytes == 8].push_back(place[alive[i].reg]);
                alive[i] = alive.back();
                alive.pop_back();
            } else {
                ++i;
            }
        }
        const bool wide = draft.registers[life.reg].bytes == 8;
        if (unused[wide].empty()) unused[wide].push_back(count[wide]++);
        place[life.reg] = unused[wide].back();
        unused[wide].pop_back();
        alive.push_back(life);
    }
    const int narrowAt = kSpecials * kSlotBytes, wideAt = narrowAt + count[0] * kSlotBytes;
    for (size_t r = kSpecials; r < place.size(); ++r)
        place[r] =
            draft.registers[r].bytes == 8 ? wideAt + place[r] * 2 * kSlotBytes : narrowAt + place[r] * kSlotBytes;
    kernel.registerBytes = wideAt + count[1] * 2 * kSlotBytes;
    const auto settle = [&](Operand& operand) {
        if (!(operand & 1)) operand = place[operand / 2];
    };
    for (Instruction& in : kernel.code) {
        for (Operand& operand : in.o) settle(operand);
        settle(in.guard);
    }
    for (std::vector<Operand>& list : kernel.lists)
        for (Operand& operand : list) settle(operand);
}

}  // namespace sharpi::emulator
