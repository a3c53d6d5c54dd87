// See translator.h.
#include "ptx/translator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "execution/operations.h"
#include "ptx/operands.h"
#include "ptx/text.h"

namespace sharpi::emulator {

namespace {

class Translator : private Operands {
public:
    Translator(const Module& module, const std::string& name) : Operands(module, name) {}

    std::unique_ptr<Kernel> run(std::string_view head, std::string_view body) {
        readHead(head);
        readBody(body);
        Instruction& end = add();  // where the text ends
        end.run = exitHandler;
        settleBranches();
        addJoins(_draft, joinHandler);
        placeRegisters(_draft);
        layOutShared();
        for (Instruction& in : kernel().code)
            in.list = in.list ? kernel().lists[reinterpret_cast<size_t>(in.list) - 1].data() : nullptr;
        return std::move(_draft.kernel);
    }

private:
    // Inline assembly may have labels in braces, each time the same.
    struct Labels {
        int outer;  // the scope around this one
        std::map<std::string, int> at;
    };
    struct Branch {
        int at, scope;
        std::string label;
    };

    void readBody(std::string_view body) {
        Statements statements(body);
        for (;;) {
            const Statements::Kind kind = statements.next(_statement);
            switch (kind) {
            case Statements::Kind::End: return;
            case Statements::Kind::Open:
                _scopes.emplace_back();
                _labels.push_back({_labelScope, {}});
                _labelScope = static_cast<int>(_labels.size()) - 1;
                break;
            case Statements::Kind::Close:
                _scopes.pop_back();
                _labelScope = _labels[_labelScope].outer;
                break;
            case Statements::Kind::Label:
                if (!_labels[_labelScope].at.try_emplace(std::string(_statement), kernel().code.size()).second)
                    refuse("a label of two places");
                break;
            case Statements::Kind::File: break;
            case Statements::Kind::Location: {
                char* end = nullptr;
                const std::string text(_statement.substr(4));
                _file = static_cast<int>(std::strtol(text.c_str(), &end, 10));
                _line = static_cast<int>(std::strtol(end, nullptr, 10));
                break;
            }
            case Statements::Kind::Statement:
                if (_statement.empty()) break;
                if (_statement[0] == '.') declare();
                else translate();
            }
        }
    }

    // "{%r1, %r2}" or "%r1".
    static std::vector<std::string_view> elements(std::string_view text) {
        if (text.front() != '{') return {text};
        return splitList(text.substr(1, text.size() - 2));
    }

    void setList(std::vector<Operand> list) {
        current().count = static_cast<uint8_t>(list.size());
        kernel().lists.push_back(std::move(list));
        current().list = reinterpret_cast<const Operand*>(kernel().lists.size());  // its number, until all are there
    }

    Instruction& add() {
        Instruction in;
        in.index = static_cast<int>(kernel().code.size());
        in.file = _file;
        in.line = _line;
        kernel().code.push_back(in);
        _draft.uses.emplace_back();
        return current();
    }

    void translate() {
        std::string_view text = _statement;
        add();
        if (text[0] == '@') {
            const size_t end = text.find_first_of(" \t");
            std::string_view guard = text.substr(1, end - 1);
            text = trimmed(text.substr(end));
            if (guard[0] == '!') {
                current().negated = true;
                guard.remove_prefix(1);
            }
            current().guard = source(guard, 4);
        }
        const size_t end = std::min(text.find_first_of(" \t\n"), text.size());
        _name = text.substr(0, end);
        _operands = splitList(text.substr(end));
        _parts.clear();
        for (size_t at = 0; at <= _name.size();) {
            const size_t dot = std::min(_name.find('.', at), _name.size());
            _parts.push_back(_name.substr(at, dot - at));
            at = dot + 1;
        }
        const std::string_view kind = _parts[0];
        if (kind == "bra") translateBranch();
        else if (kind == "ret" || kind == "exit") current().run = exitHandler;
        else if (kind == "ld" || kind == "st") translateAccess(kind == "ld");
        else if (kind == "atom" || kind == "red") translateAtomic(kind == "red");
        else if (kind == "mov") translateMove();
        else if (kind == "cvta") translateAddress();
        else if (kind == "mma") translateProduct();
        else if (kind == "ldmatrix") translateMatrices();
        else if (kind == "cp") translateCopy();
        else if (kind == "mbarrier") translateMbarrier();
        else if ((kind == "bar" || kind == "barrier") && _name != "bar.warp.sync" && _parts[1] != "cluster")
            translateBarrier();
        else if (kind == "membar" || kind == "fence" || kind == "prefetch" || kind == "griddepcontrol")
            current().run = nothingHandler;
        else if (kind == "nanosleep") current().run = pauseHandler;
        else if (kind == "trap") current().run = trapHandler;
        else translateOperation(_name);
    }

    void translateBranch() {
        current().run = current().guard == kNone ? jumpHandler : branchHandler;
        current().control = true;
        _branches.push_back({current().index, _labelScope, std::string(_operands.at(0))});
    }
    void settleBranches() {
        for (const Branch& branch : _branches) kernel().code[branch.at].immediate = targetOf(branch);
    }
    int targetOf(const Branch& branch) {
        for (int scope = branch.scope; scope >= 0; scope = _labels[scope].outer) {
            const auto found = _labels[scope].at.find(branch.label);
            if (found != _labels[scope].at.end()) return found->second;
        }
        throw Fault(kernel().name + ": there is no label " + branch.label);
    }

    void translateOperation(std::string_view name) {
        const Operation* operation = findOperation(name);
        if (!operation) refuse("an instruction that is not emulated");
        if (_parts[0] == "cvt" && _operands.size() == 2) narrowSource(operation->bytes[1]);
        current().run = operation->run;
        const int first = operation->results == 0 ? 1 : 0;  // without results, o[0] is none
        if (static_cast<int>(_operands.size()) != operation->count - first) refuse("as many operands are not emulated");
        for (int i = 0; i < static_cast<int>(_operands.size()); ++i) {
            const int bytes = operation->bytes[i + first];
            std::string_view text = _operands[i];
            if (i + first > 0) {
                current().o[i + first] = source(text, bytes);
                continue;
            }
            const size_t bar = text.find('|');
            if (bar != std::string_view::npos) {
                if (_parts[0] != "shfl") refuse("two results are not emulated");
                current().o[5] = result(trimmed(text.substr(bar + 1)), 4);
                text = trimmed(text.substr(0, bar));
            }
            current().o[0] = result(text, bytes);
        }
    }

    // A conversion may take its operand from the low half of a wider register.
    void narrowSource(int bytes) {
        const int reg = findRegister(_operands[1]);
        if (reg < 0 || bytes == 8 || _draft.registers[reg].bytes == 4) return;
        Register narrow;
        const int half = addRegister(narrow);
        _narrowed = "%narrowed" + std::to_string(half);
        _scopes.back()[_narrowed] = half;
        const Operand guard = current().guard;
        const bool negated = current().negated;
        const Operation* operation = findOperation("cvt.u32.u64");
        current().run = operation->run;
        current().o[1] = source(_operands[1], 8);
        current().o[0] = result(_narrowed, 4);
        add();
        current().guard = guard;
        current().negated = negated;
        if (guard != kNone && !(guard & 1)) _draft.uses.back().sources.push_back(guard / 2);
        _operands[1] = _narrowed;
    }

    bool has(std::string_view part) const { return std::find(_parts.begin(), _parts.end(), part) != _parts.end(); }

    Space space() const {
        if (has("global")) return Space::Global;
        if (has("shared") || has("shared::cta")) return Space::Shared;
        if (has("local")) return Space::Local;
        if (has("param")) return Space::Parameter;
        return Space::Generic;
    }

    void translateAccess(bool isLoad) {
        if (has("shared::cluster")) refuse("an instruction that is not emulated");
        const std::string_view type = _parts.back();
        const int bytes = bytesOfType(type);
        if (!bytes || _operands.size() != 2) refuse("an instruction that is not emulated");
        const Space where = space();
        const std::vector<std::string_view> values = elements(_operands[isLoad ? 0 : 1]);
        const std::string_view place = _operands[isLoad ? 1 : 0];
        Instruction& in = current();
        in.o[0] = address(place, in.immediate, in.wide);
        if (where == Space::Generic && !in.wide) refuse("an address of 32 bits");
        std::vector<Operand> list;
        int registerBytes = 4;
        for (std::string_view value : values) {
            const int reg = findRegister(value);
            registerBytes = reg >= 0 ? _draft.registers[reg].bytes : bytes == 8 ? 8 : 4;
        }
        for (std::string_view value : values)
            list.push_back(isLoad ? result(value, registerBytes) : source(value, registerBytes));
        in.run = isLoad ? loadHandler(where, bytes, type[0] == 's', registerBytes)
                        : storeHandler(where, bytes, registerBytes);
        if (!in.run) refuse("an instruction that is not emulated");
        setList(std::move(list));
    }

    void translateAtomic(bool withoutResult) {
        const Space where = space();
        const std::string_view operation = _parts[_parts.size() - 2], type = _parts.back();
        Instruction& in = current();
        in.run = atomicHandler(operation, type, where);
        if (!in.run) refuse("an instruction that is not emulated");
        const int bytes = bytesOfType(type);
        size_t next = 0;
        std::string_view to;
        if (!withoutResult) to = _operands[next++];
        in.o[0] = address(_operands[next++], in.immediate, in.wide);
        if (!withoutResult) in.o[1] = result(to, bytes);
        in.o[2] = source(_operands[next++], bytes);
        if (next < _operands.size()) in.o[3] = source(_operands[next++], bytes);
    }

    void translateMove() {
        Instruction& in = current();
        const int bytes = bytesOfType(_parts.back());
        if (_operands.size() != 2) refuse("an instruction that is not emulated");
        const bool unpacks = _operands[0].front() == '{', packs = _operands[1].front() == '{';
        if (!unpacks && !packs) {
            translateOperation(_name);
            return;
        }
        const std::vector<std::string_view> parts = elements(_operands[unpacks ? 0 : 1]);
        if (parts.size() != 2 || (bytes != 4 && bytes != 8)) refuse("an instruction that is not emulated");
        std::vector<Operand> list;
        if (unpacks) {
            in.o[0] = source(_operands[1], bytes);
            for (std::string_view part : parts) list.push_back(result(part, 4));
            in.run = bytes == 4 ? unpackHandler16 : unpackHandler32;
        } else {
            for (std::string_view part : parts) list.push_back(source(part, 4));
            in.o[0] = result(_operands[0], bytes);
            in.run = bytes == 4 ? packHandler16 : packHandler32;
        }
        setList(std::move(list));
    }

    void translateAddress() {
        const bool toGeneric = !has("to");
        const Space where = space();
        if (where == Space::Global) return translateOperation("mov.u64");
        Instruction& in = current();
        in.run = addressHandler(where, toGeneric);
        if (!in.run || _parts.back() != "u64") refuse("an instruction that is not emulated");
        in.o[1] = source(_operands.at(1), 8);
        in.o[0] = result(_operands.at(0), 8);
    }

    void translateProduct() {
        current().run = matrixProductHandler(_name);
        if (!current().run) refuse("an instruction that is not emulated");
        std::vector<Operand> list;
        for (size_t i = 1; i < _operands.size(); ++i)
            for (std::string_view part : elements(_operands[i])) list.push_back(source(part, 4));
        std::vector<Operand> all;
        for (std::string_view part : elements(_operands[0])) all.push_back(result(part, 4));
        all.insert(all.end(), list.begin(), list.end());
        setList(std::move(all));
    }

    void translateMatrices() {
        Instruction& in = current();
        if (!has("shared") || !has("b16") || !has("m8n8")) refuse("an instruction that is not emulated");
        in.o[0] = address(_operands.at(1), in.immediate, in.wide);
        if (has("trans")) in.o[1] = constant(0, 4);
        std::vector<Operand> list;
        for (std::string_view part : elements(_operands.at(0))) list.push_back(result(part, 4));
        in.run = loadMatricesHandler;
        setList(std::move(list));
    }

    void translateCopy() {
        Instruction& in = current();
        if (_name == "cp.async.commit_group") {
            in.run = closeCopiesHandler;
        } else if (_name == "cp.async.wait_all") {
            in.run = waitForCopiesHandler;
            in.immediate = -1;
        } else if (_name == "cp.async.wait_group") {
            in.run = waitForCopiesHandler;
            in.immediate = std::atoi(std::string(_operands.at(0)).c_str());
        } else if (nameWithShared() == "cp.async.mbarrier.arrive.noinc.shared.b64") {
            in.o[0] = address(_operands.at(0), in.immediate, in.wide);
            in.run = arriveAfterCopiesHandler;
        } else if (_name == "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes" ||
                   _name == "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes") {
            translateBulkCopy();
        } else if (startsWith(_name, "cp.async.bulk.prefetch")) {
            in.run = nothingHandler;
        } else if (startsWith(_name, "cp.async.ca.shared.global") || startsWith(_name, "cp.async.cg.shared.global")) {
            int64_t added = 0;
            bool wideTo = false, wideFrom = false;
            in.o[0] = address(_operands.at(0), added, wideTo);
            in.extra = static_cast<int32_t>(added);
            in.o[1] = address(_operands.at(1), in.immediate, wideFrom);
            in.wide = wideTo;
            in.count = static_cast<uint8_t>(std::atoi(std::string(_operands.at(2)).c_str()));
            if (_operands.size() > 3) in.o[2] = source(_operands[3], 4);
            in.run = copyAsyncHandler;
        } else {
            refuse("an instruction that is not emulated");
        }
    }

    void translateBulkCopy() {
        Instruction& in = current();
        if (_operands.size() != 4) refuse("an instruction that is not emulated");
        int64_t toAdded = 0, barrierAdded = 0;
        bool wideTo = false, wideFrom = false, wideBarrier = false;
        in.o[0] = address(_operands[0], toAdded, wideTo);
        in.extra = static_cast<int32_t>(toAdded);
        in.o[1] = address(_operands[1], in.immediate, wideFrom);
        in.o[2] = source(_operands[2], 4);
        in.o[3] = address(_operands[3], barrierAdded, wideBarrier);
        in.o[4] = constant(static_cast<uint64_t>(barrierAdded), 8);
        in.wide = wideTo;
        if (!wideFrom) refuse("an address of 32 bits");
        if (wideTo != wideBarrier) refuse("addresses of 32 and of 64 bits in shared memory");
        in.run = copyBulkHandler;
    }

    // Shared memory has two names.
    std::string nameWithShared() const {
        std::string name(_name);
        const size_t at = name.find(".shared::cta.");
        return at == std::string::npos ? name : name.erase(at + std::strlen(".shared"), std::strlen("::cta"));
    }

    void translateMbarrier() {
        const std::string name = nameWithShared();
        Instruction& in = current();
        size_t count = 2;
        if (name == "mbarrier.init.shared.b64") {
            in.run = initMbarrierHandler;
        } else if (name == "mbarrier.arrive.shared.b64") {
            in.run = arriveHandler;
        } else if (name == "mbarrier.arrive.expect_tx.shared.b64") {
            in.run = arriveHandler;
            count = 3;
        } else if (name == "mbarrier.test_wait.parity.shared.b64" || name == "mbarrier.try_wait.parity.shared.b64") {
            in.run = testMbarrierHandler;
            count = 3;
        }
        if (!in.run || _operands.size() != count) refuse("an instruction that is not emulated");
        const bool inits = in.run == initMbarrierHandler, tests = in.run == testMbarrierHandler;
        in.o[0] = address(_operands[inits ? 0 : 1], in.immediate, in.wide);
        if (!inits) in.o[1] = result(_operands[0], tests ? 4 : 8);
        if (tests && in.o[1] == kNone) refuse("a test without a result");
        if (inits || count == 3) in.o[2] = source(_operands.back(), 4);
    }

    void translateBarrier() {
        Instruction& in = current();
        in.run = barrierHandler;
        const bool reduces = has("red");
        if (!has("sync") && !reduces) refuse("an instruction that is not emulated");
        size_t next = 0;
        if (reduces) {
            in.immediate = has("popc") ? 0 : has("or") ? 1 : 2;
            in.o[0] = result(_operands.at(next++), 4);
        }
        in.o[1] = source(_operands.at(next++), 4);
        if (_operands.size() > next + (reduces ? 1 : 0)) in.o[3] = source(_operands[next++], 4);
        if (reduces) in.o[2] = source(_operands.at(next), 4);
    }

    std::vector<Labels> _labels = {{-1, {}}};  // of all scopes
    int _labelScope = 0;
    std::vector<Branch> _branches;
    std::string _narrowed;
    std::string_view _name;
    std::vector<std::string_view> _parts, _operands;
    int _file = 0, _line = 0;
};

}  // namespace

std::unique_ptr<Kernel> translate(const Module& module, const std::string& name, std::string_view head,
                                  std::string_view body) {
    return Translator(module, name).run(head, body);
}

}  // namespace sharpi::emulator
