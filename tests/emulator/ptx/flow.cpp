// Where the ways through a kernel part and meet.
#include <algorithm>

#include "ptx/draft.h"

namespace sharpi::emulator {

namespace {

bool branches(const Instruction& in) { return in.run == branchHandler || in.run == jumpHandler; }
bool endsBlock(const Instruction& in) { return branches(in) || in.run == exitHandler; }
// Whether the next instruction may follow.
bool fallsThrough(const Instruction& in) {
    return !(in.run == jumpHandler || (in.run == exitHandler && in.guard == kNone));
}

}  // namespace

std::vector<BasicBlock> basicBlocks(const Kernel& kernel) {
    const int count = static_cast<int>(kernel.code.size());
    std::vector<bool> starts(count + 1, false);
    starts[0] = true;
    for (const Instruction& in : kernel.code) {
        if (branches(in)) starts[in.immediate] = true;
        if (endsBlock(in)) starts[in.index + 1] = true;
    }
    std::vector<BasicBlock> blocks;
    std::vector<int> blockAt(count + 1, -1);
    for (int i = 0; i < count; ++i) {
        if (starts[i]) {
            blockAt[i] = static_cast<int>(blocks.size());
            blocks.push_back({i, i, {}, {}});
        }
        blocks.back().end = i + 1;
    }
    for (size_t b = 0; b < blocks.size(); ++b) {
        const Instruction& last = kernel.code[blocks[b].end - 1];
        const auto link = [&](int to) {
            if (to < 0) return;
            blocks[b].next.push_back(to);
            blocks[to].previous.push_back(static_cast<int>(b));
        };
        if (branches(last)) link(blockAt[last.immediate]);
        if (fallsThrough(last)) link(blockAt[blocks[b].end]);
    }
    return blocks;
}

std::vector<int> postDominators(const std::vector<BasicBlock>& blocks) {
    const int count = static_cast<int>(blocks.size()), end = count;  // `end` comes after all
    // Blocks from the end backwards, each after those that follow it, as far as loops allow.
    std::vector<int> order, place(count + 1, -1), path;
    std::vector<size_t> taken(count + 1, 0);
    std::vector<int> exits;
    for (int b = 0; b < count; ++b)
        if (blocks[b].next.empty()) exits.push_back(b);
    const auto before = [&](int b) -> const std::vector<int>& { return b == end ? exits : blocks[b].previous; };
    std::vector<bool> seen(count + 1, false);
    path.push_back(end);
    seen[end] = true;
    while (!path.empty()) {
        const int b = path.back();
        if (taken[b] < before(b).size()) {
            const int other = before(b)[taken[b]++];
            if (!seen[other]) seen[other] = true, path.push_back(other);
        } else {
            path.pop_back();
            order.push_back(b);
        }
    }
    std::reverse(order.begin(), order.end());
    for (size_t i = 0; i < order.size(); ++i) place[order[i]] = static_cast<int>(i);
    std::vector<int> after(count + 1, -1);
    after[end] = end;
    const auto meet = [&](int a, int b) {
        while (a != b) {
            while (place[a] > place[b]) a = after[a];
            while (place[b] > place[a]) b = after[b];
        }
        return a;
    };
    for (bool changed = true; changed;) {
        changed = false;
        for (int b : order) {
            if (b == end) continue;
            int found = blocks[b].next.empty() ? end : -1;
            for (int n : blocks[b].next) {
                if (place[n] < 0 || after[n] < 0) continue;
                found = found < 0 ? n : meet(n, found);
            }
            if (found != after[b]) after[b] = found, changed = true;
        }
    }
    std::vector<int> result(count);
    for (int b = 0; b < count; ++b) result[b] = after[b] == end ? -1 : after[b];
    return result;
}

void addJoins(Draft& draft, Handler join) {
    Kernel& kernel = *draft.kernel;
    const std::vector<BasicBlock> blocks = basicBlocks(kernel);
    const std::vector<int> after = postDominators(blocks);
    const int count = static_cast<int>(kernel.code.size());
    std::vector<bool> joins(count + 1, false);
    for (size_t b = 0; b < blocks.size(); ++b) {
        Instruction& last = kernel.code[blocks[b].end - 1];
        if (last.run != branchHandler || after[b] < 0) continue;
        last.join = blocks[after[b]].begin;
        joins[last.join] = true;
    }
    std::vector<int> moved(count + 1);
    int added = 0;
    for (int i = 0; i <= count; ++i) {
        moved[i] = i + added;  // where a branch to it goes: the join, if there is one
        if (joins[i]) ++added;
    }
    std::vector<Instruction> code;
    std::vector<Draft::Uses> uses;
    for (int i = 0; i < count; ++i) {
        if (joins[i]) {
            Instruction in;
            in.run = join;
            in.control = true;
            in.file = kernel.code[i].file;
            in.line = kernel.code[i].line;
            code.push_back(in);
            uses.emplace_back();
        }
        Instruction in = kernel.code[i];
        if (branches(in)) in.immediate = moved[in.immediate];
        if (in.join >= 0) in.join = moved[in.join];
        code.push_back(in);
        uses.push_back(std::move(draft.uses[i]));
    }
    for (size_t i = 0; i < code.size(); ++i) code[i].index = static_cast<int>(i);
    kernel.code = std::move(code);
    draft.uses = std::move(uses);
}

}  // namespace sharpi::emulator
